"""The target's chat template: rendering, the turn end it writes, the slot a user's words go into."""

import re
from typing import Any

from jinja2.exceptions import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from distill.errors import UserError
from distill.target import Target

Message = dict[str, Any]

SENTINEL = "zq7sentinel7qz"
"""Stands for a message's content, to find where a template puts it."""


FIRST_WORDS = ("What", "How", "the", "I", "Hello")
"""How user turns may begin."""


class ChatTemplate:
    """A target's chat template and tokenizer, asked only through renderings.

    Nothing here knows a template family: every fact is read off a rendering of the template itself.

    Raises:
        UserError: the target has no tokenizer or no chat template.
    """

    def __init__(self, target: Target, *, source: str = "chat"):
        tokenizer = target.tokenizer
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError(
                f"target {target.info.name!r} must have a chat template for data.source={source}, got none; "
                "use data.source=text with plain text"
            )
        self.tokenizer = tokenizer
        self.special = frozenset(tokenizer.all_special_ids) | {
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        texts = (str(tokenizer.convert_ids_to_tokens(i)) for i in self.special)
        self._special_text = re.compile("|".join(re.escape(text) for text in texts) or "(?!)")
        self._eos = frozenset(target.info.eos_ids)
        self.has_markers = "generation" in _block_names(self._template_text())
        self.turn_end = self._find_turn_end()

    def _template_text(self) -> str:
        return self.tokenizer.get_chat_template()

    def render(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the conversation as text.

        Raises:
            UserError: the template refuses the messages.
        """
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"the messages must fit the target's chat template, which says: {error}") from error

    def render_marked(self, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
        """Return the text and the character spans inside the template's generation markers."""
        rendered: Any
        try:
            rendered = render_jinja_template(
                [messages],
                chat_template=self._template_text(),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        except (TemplateError, TypeError, KeyError) as error:
            raise UserError(f"the messages must fit the target's chat template, which says: {error}") from error
        texts, spans = rendered
        return texts[0], [(start, stop) for start, stop in spans[0]]

    def encode(self, text: str) -> list[int]:
        """Tokenise rendered text; the template has written the special tokens already."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """Text of ids, special tokens shown."""
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def has_special(self, text: str) -> bool:
        """True when the text holds a special token's own spelling, which would be read as that token."""
        return self._special_text.search(text) is not None

    def leading_turn_end(self, ids: list[int]) -> int:
        """Length of "white space, then a special token" at the start of ids; 0 when they start otherwise."""
        for i, token in enumerate(ids):
            if token in self.special or token in self._eos:
                return i + 1
            if self.decode([token]).strip():
                return 0
        return 0

    def _find_turn_end(self) -> int | None:
        """The special token this template writes after an assistant's content, if any."""
        text = self.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": SENTINEL}])
        place = text.rfind(SENTINEL)
        if place < 0:
            return None
        after = self.encode(text[place + len(SENTINEL) :])
        length = self.leading_turn_end(after)
        return after[length - 1] if length else None

    def user_slot(self, system: str | None) -> tuple[list[int], str]:
        """Where a user's first words go.

        Returns:
            The ids that come before them, and the text the template writes right after them.

        Raises:
            UserError: the template does not show the user's words.
        """
        text = self.render([*system_message(system), {"role": "user", "content": SENTINEL}])
        place = text.rfind(SENTINEL)
        if place < 0:
            raise UserError("the target's chat template must show the user's words; use data.source=prompts")
        before, after = text[:place], text[place + len(SENTINEL) :]
        ids = self.encode(before)
        if any(self.encode(before + word)[: len(ids)] != ids for word in FIRST_WORDS):
            # The template's last blank belongs to the first word's token.
            ids = self.encode(before.rstrip(" "))
        if not ids:
            raise UserError("the target's chat template must open a user turn; use data.source=prompts")
        return ids, after.strip() or after

    def continuation(self, messages: list[Message], user: str) -> list[int] | None:
        """The ids between an answer's turn end and the answer to the next user turn.

        Args:
            messages: everything up to the user turn that was just answered.
            user: the next user turn.

        Returns:
            None when the template rewrites the history or marks no turn end, so that ids cannot be appended.
        """
        prompt = self.render(messages, add_generation_prompt=True)
        longer = [*messages, {"role": "assistant", "content": SENTINEL}, {"role": "user", "content": user}]
        text = self.render(longer, add_generation_prompt=True)
        place = text.find(SENTINEL, len(prompt))
        if place < 0 or not text.startswith(prompt) or text[len(prompt) : place].strip():
            return None
        after = self.encode(text[place + len(SENTINEL) :])
        length = self.leading_turn_end(after)
        if not length or after[length - 1] != self.turn_end:
            return None
        return after[length:]


def system_message(system: str | None) -> list[Message]:
    """The system message as a list of none or one."""
    return [] if system is None else [{"role": "system", "content": system}]


def _block_names(template: str) -> set[str]:
    """First word of every ``{% ... %}`` block."""
    pieces = template.split("{%")[1:]
    words = [piece.split("%}")[0].strip("-+ \n\t").split() for piece in pieces]
    return {word[0] for word in words if word}

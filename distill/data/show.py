"""Showing what a conversation trains on."""

from rich.text import Text

from distill.data.conversation import Conversation
from distill.target import Target

OPEN, CLOSE = "[[", "]]"


def render_mask(conversation: Conversation, target: Target) -> Text:
    """Return a conversation as text: supervised tokens in colour and, for want of it, in double brackets.

    Args:
        conversation: ids and mask.
        target: its tokenizer decodes.

    Returns:
        A legend with counts, then the text, special tokens spelled out.
    """
    mask = conversation.loss_mask
    n_supervised = int(mask.sum())
    share = n_supervised / max(1, len(mask))
    result = Text()
    result.append(f"{OPEN}trained on{CLOSE}", style="bold green")
    result.append(f" {n_supervised} of {len(mask)} tokens ({share:.0%})", style="bold")
    result.append("; the rest is context\n\n", style="dim")
    ids = conversation.ids.tolist()
    edges = [0, *(i for i in range(1, len(ids)) if mask[i] != mask[i - 1]), len(ids)]
    shown = ""
    for begin, end in zip(edges, edges[1:], strict=False):
        # Decoding from the start keeps blanks that some tokenizers drop at the beginning of a text.
        text = _decode(ids[:end], target)
        piece = text[len(shown) :] if text.startswith(shown) else _decode(ids[begin:end], target)
        shown = text
        if mask[begin]:
            result.append(f"{OPEN}{piece}{CLOSE}", style="bold green")
        else:
            result.append(piece, style="dim")
    return result


def _decode(ids: list[int], target: Target) -> str:
    if target.tokenizer is None:
        return "".join(f" {token}" for token in ids)
    return target.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

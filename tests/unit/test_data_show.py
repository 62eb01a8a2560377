"""What a conversation trains on is readable with and without colour."""

import io

import data_tools as tools
import numpy as np
import pytest
from rich.console import Console

from distill.data import ChatTemplate, Conversation, Progress, render_mask, stderr_progress, supervise


def shown(words, messages):
    target = tools.target(words)
    conversation = supervise(messages, ChatTemplate(target)).conversation
    return conversation, render_mask(conversation, target)


@pytest.mark.parametrize("name", ["CHATML", "INST", "HEADERS"])
def test_supervised_text_is_bracketed_and_coloured(name):
    messages = [
        {"role": "user", "content": "the [bold]cat[/bold]"},
        {"role": "assistant", "content": "sat é on\na mat"},
        {"role": "user", "content": "why"},
        {"role": "assistant", "content": "so"},
    ]
    words = tools.tokenizer(name)
    conversation, text = shown(words, messages)
    body = text.plain.split("\n\n", 1)[1]
    runs = [part.split("]]")[0] for part in body.split("[[")[1:]]
    end = tools.END.get(name, "<|im_end|>")
    blank = " " if name == "INST" else ""
    assert runs == [f"{blank}sat é on\na mat{end}", f"{blank}so{end}"]
    assert body.replace("[[", "").replace("]]", "") == words.decode(conversation.ids.tolist())
    coloured = "".join(body_part for body_part in styled(text))
    assert coloured == "[[trained on]]" + "".join(f"[[{run}]]" for run in runs)
    n = int(conversation.loss_mask.sum())
    assert text.plain.startswith(f"[[trained on]] {n} of {len(conversation.ids)} tokens")


def styled(text):
    """The parts of the text that are green."""
    return [text.plain[s.start : s.end] for s in text.spans if "green" in str(s.style)]


def test_without_colour_the_brackets_remain():
    _, text = shown(None, [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}])
    out = io.StringIO()
    Console(file=out, no_color=True, width=200).print(text)
    assert "[[ho<|im_end|>]]" in out.getvalue()
    assert "\x1b" not in out.getvalue()


def test_a_target_without_a_tokenizer_shows_ids():
    target = tools.target()
    target.tokenizer = None
    conversation = Conversation(ids=np.array([5, 6, 7], dtype=np.int32), loss_mask=np.array([False, True, True]))
    assert render_mask(conversation, target).plain.endswith(" 5[[ 6 7]]")


def test_progress_goes_to_stderr_now_and_then(capsys):
    report = stderr_progress(every_s=3600)
    for done in (3, 4):
        report(Progress(done=done, total=9, tokens=70, seconds=5, tokens_per_s=14.2, seconds_left=75.0))
    captured = capsys.readouterr()
    assert captured.err == "data: 3/9 conversations, 70 tokens, 14 tokens/s, 1:15 left\n"
    assert captured.out == ""

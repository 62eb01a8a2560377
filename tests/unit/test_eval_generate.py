"""Streaming: pieces add up to the text, drafted tokens are marked with and without colour."""

import io

import pytest
from rich.console import Console

from distill.data import DataConfig
from distill.decode import StepRecord
from distill.errors import UserError
from distill.target import TargetConfig
from serve_eval import generate, show_mask
from serve_eval.pieces import TextStream, pieces

BYTES = "a né€😀 b".encode()


def decode_bytes(ids):
    return bytes(ids).decode("utf-8", errors="replace")


def test_pieces_add_up_and_wait_for_whole_characters():
    found = pieces(list(BYTES), decode_bytes)
    assert "".join(found) == "a né€😀 b"
    assert found[:6] == ["a", " ", "n", "", "é", ""]


def test_pieces_keep_blanks_that_a_decoder_strips_at_the_start():
    words = ["▁Hello", "▁world", ",", "▁you"]

    def decode(ids):  # like sentencepiece: the leading blank of a text is dropped
        return "".join(words[i].replace("▁", " ") for i in ids).removeprefix(" ")

    assert pieces([0, 1, 2, 3], decode) == ["Hello", " world", ",", " you"]


def printed(**console):
    out = io.StringIO()
    printer = generate.Printer(Console(file=out, soft_wrap=True, **console), TextStream(decode_bytes))
    printer(0, None, [ord("A")])
    printer(0, StepRecord(tokens=(66, 67, 68), accepted=2, offered=2), [66, 67, 68])
    printer(0, StepRecord(tokens=(69,), accepted=0, offered=2), [69])
    printer(0, StepRecord(tokens=(70, 71), accepted=2, offered=2), [70, 71])
    printer.close()
    return out.getvalue()


def test_drafted_tokens_are_bracketed_without_colour():
    assert printed(color_system=None) == "A[BC]DE[FG]\n"


def test_drafted_tokens_are_coloured_and_underlined_with_colour():
    text = printed(force_terminal=True, color_system="standard")
    assert "\x1b[4;32mB\x1b[0m\x1b[4;32mC\x1b[0mDE" in text
    assert "[BC]" not in text


def test_markup_in_the_text_is_printed_as_it_is():
    out = io.StringIO()
    printer = generate.Printer(Console(file=out, soft_wrap=True, color_system=None), TextStream(decode_bytes))
    printer(0, None, list(b"[bold]x[/bold] :smile:"))
    printer.close()
    assert out.getvalue() == "[bold]x[/bold] :smile:\n"


def test_generate_answers_and_reports_its_own_speed_only(capsys):
    config = generate.Config(target=TargetConfig(name="tiny", verify=False), prompt="hi", max_new_tokens=5)
    out = generate.run(config)
    text = capsys.readouterr().out
    assert 1 <= len(out.ids) <= 5
    assert f"{len(out.ids)} tokens" in text
    assert "plain decoding:" in text
    assert "speedup" not in text


@pytest.mark.parametrize("prompt", [None, "  "])
def test_generate_needs_a_prompt(prompt):
    with pytest.raises(UserError, match="prompt must be text"):
        generate.run(generate.Config(prompt=prompt))


def test_generate_needs_a_checkpoint_or_a_target():
    with pytest.raises(
        UserError, match="checkpoint must be a run folder or an export folder, got none; or name a target"
    ):
        generate.run(generate.Config(prompt="hi"))


def test_show_mask_colours_what_is_trained_on(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(
        '{"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "reply"}]}\n' * 2
    )
    data = DataConfig(source="chat", path=str(path), max_len=64, pack_len=64, min_answer_tokens=1)
    out = io.StringIO()
    config = show_mask.Config(target=TargetConfig(name="tiny", verify=False), data=data, limit=1)
    show_mask.run(config, console=Console(file=out, width=200, color_system=None))
    assert "[[reply<|im_end|>]]" in out.getvalue()
    assert "conversation 1" in out.getvalue()
    assert "conversation 2" not in out.getvalue()

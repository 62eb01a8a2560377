"""Every engine that is installed decodes without a drafter what we decode, token for token, in float32."""

import pytest

import engines
from distill.decode import Decoder
from distill.target import TargetConfig, load_target
from distill.target.packaged import smollm2_folder

pytestmark = [pytest.mark.engine, pytest.mark.slow]

QUESTIONS = (
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "A train goes 60 km in 40 minutes. How fast is it, in km/h?",
    "Name three fruits.",
)
NEW = 32


@pytest.fixture(scope="module")
def expected():
    """Prompts, and what follows them."""
    target = load_target(TargetConfig(name="smollm2", dtype="float32", device="cpu"))
    prompts = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return prompts, [generation.ids for generation in Decoder(target).generate(prompts, max_new_tokens=NEW)]


@pytest.fixture(params=engines.ENGINES)
def engine(request):
    """An engine, if it is installed."""
    one = engines.engine(request.param)
    if one.environment.state() != "ready":
        pytest.skip(f"python -m engines setup {one.name}")
    return one


def test_plain_text_is_ours(engine, expected):
    prompts, texts = expected
    result = engine.run(smollm2_folder(), None, "none", prompts, max_new_tokens=NEW)
    assert result.ids == texts
    assert (result.drafted, result.accepted) == (0, 0)

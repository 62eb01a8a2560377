"""Every engine that is installed decodes what we decode, token for token, in float32; skipped where there is none."""

import pytest

import engines
from distill.decode import Decoder
from distill.errors import UserError
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
K = 3


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


def test_the_target_as_its_own_drafter_is_always_right(engine, expected):
    """Every proposal is kept whole, so the counters are known beforehand."""
    prompts, texts = expected
    draft = smollm2_folder()
    if engine.name == "llama_cpp":
        draft = engine.prepare_target(draft, "float32").parent
    result = engine.run(smollm2_folder(), draft, "draft_model", prompts, max_new_tokens=NEW, k=K)
    assert result.ids == texts
    passes = sum(-(-(len(text) - 1) // (K + 1)) for text in texts)
    # Some engines draft no more than there is room for in a text's last pass, and do not count what lies past its end.
    ended = sum(len(text) < NEW for text in texts)
    assert passes * K - len(texts) * K <= result.drafted <= passes * K
    assert result.drafted - ended * K <= result.accepted <= result.drafted
    if result.drafts is not None:
        assert (result.drafts, result.drafted, result.accepted) == (passes, passes * K, passes * K)
        assert result.accepted_per_position == (passes,) * K


def test_a_drafter_it_cannot_load_is_one_sentence(engine, expected, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["NoSuchModel"], "model_type": "no-such"}')
    with pytest.raises(UserError, match=f"^engine {engine.name} must ") as caught:
        engine.run(smollm2_folder(), tmp_path, "draft_model", expected[0][:1], max_new_tokens=4)
    assert "\n" not in str(caught.value)

"""Several processes write parts through a shared folder; here they are threads with locks and files of their own."""

import threading

import data_tools as tools
import pytest
from test_data_parts import narrow, one, part, settings

from distill.data import together
from distill.data.store import read_manifest
from distill.data.together import RANKS, is_shared, prepare_together, write_share
from distill.errors import UserError


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    monkeypatch.setattr(together, "POLL_S", 0.005)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return one(tmp_path_factory.mktemp("whole"), settings())


def share(folder, rank, world, *, config=None, answer=narrow, timeout_s=20.0):
    make = tools.decoders_of(answer, rank)
    config = config or settings()
    write_share(config, tools.target(), folder, rank=rank, world=world, timeout_s=timeout_s, make_decoder=make)


def first(folder, world, *, config=None, answer=narrow, timeout_s=20.0):
    config = config or settings()
    return prepare_together(
        config,
        tools.target(),
        folder,
        lambda _: None,
        world=world,
        timeout_s=timeout_s,
        make_decoder=tools.decoders_of(answer),
    )


def all_together(folder, world, **options):
    """Run every process; returns what the first one has."""
    others = [threading.Thread(target=share, args=(folder, rank, world), kwargs=options) for rank in range(1, world)]
    for thread in others:
        thread.start()
    data = first(folder, world, **options)
    for thread in others:
        thread.join(20)
        assert not thread.is_alive()
    return data


def failing_after(limit):
    def answer(request, sampling):
        if request.request_id > limit:
            raise UserError("gone")
        return narrow(request, sampling)

    return answer


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_the_data_do_not_depend_on_the_number_of_processes(tmp_path, whole, world):
    data = all_together(tmp_path, world)
    assert data.data_hash == whole.data_hash
    assert data.stats["left_out"] == whole.stats["left_out"]
    assert not (tmp_path / RANKS).exists()
    assert all_together(tmp_path, world).data_hash == whole.data_hash


def test_more_data_are_shared_too(tmp_path, whole):
    all_together(tmp_path, 2, config=settings(n_conversations=10))
    seen = []

    def noting(request, sampling):
        seen.append(request.request_id)
        return narrow(request, sampling)

    before = read_manifest(tmp_path).next_index
    assert all_together(tmp_path, 2, answer=noting).data_hash == whole.data_hash
    assert min(seen) >= before


@pytest.mark.parametrize("worlds", [(2, 2), (3, 2), (2, 3), (3, 1)])
def test_an_interrupted_run_goes_on_with_any_number_of_processes(tmp_path, whole, worlds):
    before, after = worlds
    for rank in range(1, before):
        share(tmp_path, rank, before)
    with pytest.raises(UserError, match="gone"):
        first(tmp_path, before, answer=failing_after(40))
    assert read_manifest(tmp_path) is None
    assert all_together(tmp_path, after).data_hash == whole.data_hash
    assert not (tmp_path / RANKS).exists()


def test_a_run_that_was_interrupted_while_merging_goes_on(tmp_path, whole, monkeypatch):
    share(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(together.shutil, "rmtree", lambda *_, **__: None)  # merged, but not cleared away
        first(tmp_path, 2, config=settings(n_conversations=12))
    assert (tmp_path / RANKS).exists()
    assert read_manifest(tmp_path).conversations == 12
    assert all_together(tmp_path, 2).data_hash == whole.data_hash


def test_a_process_that_is_gone_is_reported(tmp_path):
    with pytest.raises(UserError, match=r"the other processes must go on writing .*got no change in 0.2 s"):
        first(tmp_path, 2, timeout_s=0.2)


def test_a_first_process_that_does_not_clear_up_is_reported(tmp_path):
    share(tmp_path, 1, 3)
    with pytest.raises(UserError, match=r"the first process must clear away .*got no change in 0.2 s"):
        share(tmp_path, 1, 2, timeout_s=0.2)


def test_parts_that_were_written_by_hand_are_merged_and_stay(tmp_path, whole):
    for number in (1, 2):
        part(tmp_path, settings(), f"{number}/2")
    assert not is_shared(settings(), tmp_path, world=4)
    assert all_together(tmp_path, 4).data_hash == whole.data_hash
    assert (tmp_path / "part-1-of-2").exists()


def test_finished_conversations_are_not_shared(tmp_path):
    assert is_shared(settings(), tmp_path, world=2)
    assert not is_shared(settings(source="chat", path="x"), tmp_path, world=2)
    assert not is_shared(settings(), tmp_path, world=1)

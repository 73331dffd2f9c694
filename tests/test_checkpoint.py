"""Run directories: whole after any crash, refused with one line when anything is wrong."""

import contextlib
import errno
import hashlib
import json
import os
import resource
import shutil
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from deaths import Died, dying_before, full_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.numpy import save as serialised

from nanoeuler.errors import UserError
from nanoeuler.model.config import ModelConfig
from nanoeuler.model.weights import initialise
from nanoeuler.tokenizer.tokenizer import Tokenizer
from nanoeuler.training import checkpoint as saving
from nanoeuler.training import loop
from nanoeuler.training.checkpoint import load, load_model, rewind, save, tidy
from nanoeuler.training.folder import LOCK, add_metrics, checkpoints, locked, read_metrics
from nanoeuler.training.optim import AdamW
from nanoeuler.training.run import Run, Settings, identity

RIVER = Path(__file__).parents[1] / "data" / "river.txt"
CONFIG = ModelConfig(
    vocab_size=280, dim=8, n_layers=2, n_heads=2, n_kv_heads=1, hidden=8, context=8, n_predict=2
)
AT4, AT5 = "step-00000004", "step-00000005"
LARGE = ("model.safetensors", "optimizer.safetensors")
INSIDE = tuple(f"{AT4}/{name}" for name in (*LARGE, "state.json"))
FILES = (*INSIDE, "config.json", "tokenizer.json")


def run_at(step, seed=3):
    """A run whose every number depends on `step`."""
    run = Run.begin(CONFIG, Settings(steps=9), tokenizer(), "digest")
    rng = np.random.default_rng((seed, step))
    for tensors in (run.weights, run.optimizer.m, run.optimizer.v):
        for tensor in tensors.values():
            tensor[...] = rng.random(tensor.shape)
    run.step = step
    return run


def tokenizer(cache=[]):  # noqa: B006 (trained once)
    if not cache:
        cache.append(Tokenizer.train(RIVER.read_bytes(), CONFIG.vocab_size))
    return cache[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "run"
    save(out, run_at(4))
    return out


def same(a, b):
    return all(
        np.array_equal(x.flat, y.flat)
        for x, y in (
            (a.weights, b.weights), (a.optimizer.m, b.optimizer.m), (a.optimizer.v, b.optimizer.v)
        )
    )  # fmt: skip


def test_what_is_saved_comes_back(saved):
    run, back = run_at(4), load(saved)
    assert same(run, back) and (back.config, back.settings) == (run.config, run.settings)
    assert (back.step, back.data, back.tokenizer.hash) == (4, "digest", run.tokenizer.hash)
    config, back_tokenizer, weights = load_model(saved)
    assert config == CONFIG and back_tokenizer.hash == run.tokenizer.hash
    assert np.array_equal(weights.flat, run.weights.flat)


def files(out):
    return sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())


def test_saving_the_same_run_gives_the_same_bytes(saved, tmp_path):
    save(tmp_path, run_at(4))
    assert files(tmp_path) == sorted(FILES)
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (saved / name).read_bytes(), name


def test_a_save_is_what_safetensors_would_have_written(saved):
    out, run = saved, run_at(4)
    folder = checkpoints(out)[-1][1]
    for name, arrays in (("model", dict(run.weights)), ("optimizer", run.moments)):
        assert (folder / f"{name}.safetensors").read_bytes() == serialised(arrays)


def test_a_step_is_saved_once(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    with pytest.raises(UserError, match="step 4 could not be written .* the save of step 4 is"):
        save(out, run_at(4))
    assert same(load(out), run_at(4)) and files(out) == sorted(FILES)


def test_the_last_saves_are_kept(tmp_path):
    for step in range(6):
        save(tmp_path, run_at(step), keep=3)
        assert [at for at, _ in checkpoints(tmp_path)] == list(range(max(0, step - 2), step + 1))
    save(tmp_path, run_at(6), keep=2)  # resumed with another number
    assert [at for at, _ in checkpoints(tmp_path)] == [5, 6]
    save(tmp_path, run_at(8), keep=4)
    assert [at for at, _ in checkpoints(tmp_path)] == [5, 6, 8]
    tidy(tmp_path, keep=1)
    assert [at for at, _ in checkpoints(tmp_path)] == [8]
    assert same(load(tmp_path), run_at(8))
    with pytest.raises(AssertionError):
        tidy(tmp_path, keep=0)
    assert same(load(tmp_path), run_at(8))


def test_what_is_no_save_is_no_save(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    arabic = f"step-{8 * chr(0x663)}"  # 33333333 in digits that int() reads
    for name in ("step-5", "step-000000005", "step-x", "step-", arabic):
        (out / name).mkdir()
    (out / "step-00000009").write_text("a file")
    (out / "step-00000010").symlink_to(out / "nowhere")
    (out / ".step-00000007.part").mkdir()
    assert checkpoints(out) == [(4, out / AT4)] and same(load(out), run_at(4))
    tidy(out)
    assert not (out / ".step-00000007.part").exists() and (out / "step-5").exists()


def test_what_is_not_ours_is_not_removed(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    elsewhere = shutil.copytree(saved / AT4, tmp_path / "elsewhere")
    (out / "step-00000002").symlink_to(elsewhere)  # an old save on another disk: the link goes
    (out / ".step-00000003.part").symlink_to(elsewhere)
    (out / ".step-00000005.part").write_text("a file")
    (out / ".config.json.77.part").write_text("{")
    (out / ".mine.part").mkdir()
    tidy(out, keep=1)
    assert [path.name for path in out.glob(".*")] == [".mine.part"]
    assert checkpoints(out) == [(4, out / AT4)] and len(list(elsewhere.iterdir())) == 3
    for keep in (0, -1):
        with pytest.raises(AssertionError):
            tidy(out, keep=keep)


def test_one_program_at_a_time(tmp_path):
    with locked(tmp_path / "run"):
        with pytest.raises(UserError, match="another program trains there now"):
            with locked(tmp_path / "run"):
                pass
        with locked(tmp_path / "other"):
            pass
    with locked(tmp_path / "run"):
        pass
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="File exists.*solve that problem"):
        with locked(tmp_path / "file"):
            pass


def state_of(out, step=4):
    return json.loads((out / f"step-{step:08d}" / "state.json").read_text())


def test_the_state_tells_people_where_the_run_stands(tmp_path):
    save(tmp_path, run_at(4), windows=10)  # of 16 windows a step
    state, config = state_of(tmp_path), json.loads((tmp_path / "config.json").read_text())
    assert (state["step"], state["windows_read"]) == (4, 64)
    assert (state["pass"], state["window"]) == (6, 4)
    assert state["tokenizer"] == config["tokenizer"] == tokenizer().hash
    assert state["program"] == config["program"] == run_at(4).program
    assert set(state["program"]) == {"nanoeuler", "numpy", "numba", "processor"}


def test_the_order_in_which_the_disk_is_told(saved, tmp_path):
    """Files before their folder, the folder before its name, the name before anything is removed.

    A power failure cannot be had in a test; the order that survives one can be compared.
    """
    out, events = shutil.copytree(saved, tmp_path / "run"), []
    add_metrics(out, {"step": 4})
    fsync, rename = os.fsync, os.rename

    def noting_fsync(handle):
        events.append(os.fstat(handle).st_ino)
        fsync(handle)

    def noting_rename(source, target):
        events.append("rename")
        rename(source, target)

    with mock.patch("os.fsync", noting_fsync), mock.patch("os.rename", noting_rename):
        save(out, run_at(5), keep=1)
    new = [out / AT5 / name for name in (*LARGE, "state.json")]
    told = [path.stat().st_ino for path in (out / "metrics.jsonl", *new, out / AT5, out)]
    assert events == [*told[:-1], "rename", told[-1], "rename"]


# A save waits for the disk six times: metrics, three files, the folder, the run directory.
@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir"])
def test_a_death_at_any_write_leaves_one_whole_save(name, saved, tmp_path):
    steps = []
    for call in range(1, 20):
        out = tmp_path / f"{call}"
        shutil.copytree(saved, out)
        add_metrics(out, {"step": 4})
        died = True
        with dying_before(os, name, call):
            try:
                save(out, run_at(5), keep=1)
                died = False
            except Died:
                pass
        before = files(out)
        weights = load_model(out)[2]
        back = load(out)
        assert files(out) == before  # reading changes nothing
        steps.append(back.step)
        assert same(back, run_at(back.step)) and np.array_equal(weights.flat, back.weights.flat)
        rewind(out, back, keep=1)
        assert [path.name for path in out.iterdir() if "step" in path.name] == [
            f"step-{back.step:08d}"
        ]
        save(out, run_at(6))  # and life goes on
        assert same(load(out), run_at(6))
        if not died:
            break
    assert steps == sorted(steps) and steps[0] == 4 and steps[-1] == 5
    assert len(steps) == {"fsync": 7, "rename": 3, "mkdir": 2}[name]


@pytest.mark.parametrize("name", ["fsync", "rename", "replace"])
def test_a_death_in_the_first_save_leaves_no_run_or_a_whole_one(name, tmp_path):
    there = []
    for call in range(1, 20):
        out, died = tmp_path / f"{call}", True
        with dying_before(os, name, call):
            try:
                rewind(out, run_at(0))
                assert not checkpoints(out)
                save(out, run_at(0))
                died = False
            except Died:
                pass
        there.append(bool(checkpoints(out)))
        if not there[-1]:
            with pytest.raises(UserError, match="but found (none|no config.json)"):
                load(out)
        rewind(out, run_at(0))  # begun again, or gone on with
        if not checkpoints(out):
            save(out, run_at(0))
        assert same(load(out), run_at(0))
        assert files(out) == sorted(
            ["config.json", "tokenizer.json", "metrics.jsonl"]
            + [f"step-00000000/{name}" for name in (*LARGE, "state.json")]
        )
        if not died:
            break
    assert there == sorted(there) and len(there) >= 2


@pytest.mark.parametrize("name", ["fsync", "rename", "mkdir", "replace"])
def test_a_full_disk_is_one_line_and_the_save_before_is_whole(name, saved, tmp_path):
    for step, begun in ((5, True), (0, False)):
        for call in range(1, 20):
            out = tmp_path / f"{step}-{call}"
            if begun:
                shutil.copytree(saved, out)
                add_metrics(out, {"step": 4})
            with full_disk(name, call) as count:
                try:
                    save(out, run_at(step), keep=1)
                except UserError as error:
                    told = str(error)
            if count[0] < call:
                break
            assert "No space left on device" in told and "\n" not in told
            assert not list(out.glob(".*")) or "older saves" in told
            if checkpoints(out):
                kept = checkpoints(out)[-1][0]
                assert f"the save of step {kept} is complete" in told and "--resume" in told
                assert same(load(out), run_at(kept))
            else:
                assert not begun and "nothing was saved yet" in told
        assert call > 1 or (begun and name == "replace")  # which only the first save needs


@contextmanager
def files_of_at_most(size):
    """No file may grow beyond `size` bytes, as if the disk were full: the kernel's own refusal."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_fills_up_in_the_middle_of_a_file(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    whole = [(saved / name).stat().st_size for name in INSIDE]
    for size in (0, 1, 100, whole[0] // 2, whole[0] - 1, whole[0], whole[1] - 1):
        with files_of_at_most(size), pytest.raises(UserError) as caught:
            save(out, run_at(5))
        assert "step 5 could not be written" in str(caught.value)
        assert "the save of step 4 is complete; make room" in str(caught.value)
        assert files(out) == sorted(FILES) and same(load(out), run_at(4))
    with files_of_at_most(10), pytest.raises(UserError, match="metrics.jsonl could not .*step 4"):
        add_metrics(out, {"step": 5, "loss": 1.0})
    save(out, run_at(5))
    assert same(load(out), run_at(5))
    assert read_metrics(out) == []  # the line that did not fit


def test_older_saves_that_cannot_be_removed(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    with full_disk("rename", 2), pytest.raises(UserError, match="older .* step 5 is complete"):
        save(out, run_at(5), keep=1)
    assert [step for step, _ in checkpoints(out)] == [4, 5]


@pytest.mark.parametrize("where", ["weights", "m", "v"])
def test_numbers_that_are_not_finite_are_not_saved(where, saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    run = run_at(5)
    tensors = run.weights if where == "weights" else getattr(run.optimizer, where)
    tensors["norm"][0] = np.nan
    with pytest.raises(UserError, match="step 5: (m.|v.|)norm is not finite"):
        save(out, run)
    assert same(load(out), run_at(4)) and files(out) == sorted(FILES)


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="could not be written"):
        save(tmp_path / "file", run_at(1))
    with pytest.raises(UserError):
        load(tmp_path / "file")
    with pytest.raises(UserError, match="no config.json"):
        load(tmp_path / "nowhere")


def refused(out, words=None):
    """Continuing the run in `out` is refused."""
    with pytest.raises(UserError, match=words) as caught:
        load(out)
    assert str(caught.value).isprintable()


def test_a_damaged_checkpoint_names_the_one_before_it(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    save(out, run_at(5))
    (out / AT5 / "optimizer.safetensors").write_bytes(b"")
    refused(out, f"{AT5} is damaged .*optimizer.safetensors is not .*delete that folder .* step 4")
    assert np.array_equal(load_model(out)[2].flat, run_at(5).weights.flat)  # needs no moments
    (out / AT5 / "model.safetensors").unlink()
    refused(out, f"{AT5} is damaged .*model.safetensors is missing.*delete .* from step 4")
    with pytest.raises(UserError, match="delete that folder to go on from step 4"):
        load_model(out)
    shutil.rmtree(out / AT5)
    assert same(load(out), run_at(4))
    shutil.rmtree(out / AT4)
    (out / AT4).mkdir()
    refused(out, f"{AT4} is damaged .*it is the only save there")
    (out / AT4).rmdir()
    refused(out, "expected a save in .*, but found none")


def test_a_save_of_another_run_is_refused(saved, tmp_path):
    """Its files fit, its step fits; only the run is another."""
    other = tmp_path / "other"
    run = run_at(4)
    run.data = "another digest"
    save(other, run)
    for foreign in (AT4, "config.json"):
        out = shutil.copytree(saved, tmp_path / f"with {foreign}")
        if foreign == AT4:
            shutil.rmtree(out / AT4)
            shutil.copytree(other / AT4, out / AT4)
        else:
            shutil.copy(other / foreign, out)
        refused(out, f"{AT4} and .*config.json are from different runs")


def whole_again(out):
    """The run in `out`, which was refused for no fault of its own, is whole and loads."""
    assert same(load(out), run_at(5)) and [step for step, _ in checkpoints(out)] == [4, 5]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("reader", ["sha256_of", "safe_open"])
def test_a_refusal_to_read_is_no_damage(saved, tmp_path, number, reader):
    out = shutil.copytree(saved, tmp_path / "run")
    save(out, run_at(5))
    refusal = OSError(number, os.strerror(number), str(out / AT5 / "model.safetensors"))
    with mock.patch.object(saving, reader, side_effect=refusal), pytest.raises(UserError) as caught:
        load(out)
    assert f"cannot be read ({os.strerror(number)})" in str(caught.value)
    assert "delete" not in str(caught.value) and "damaged" not in str(caught.value)
    whole_again(out)


def test_no_file_can_be_opened(saved, tmp_path):
    """With every file descriptor in use, as the system itself says it, wherever reading stops."""
    out, told = shutil.copytree(saved, tmp_path / "run"), set()
    save(out, run_at(5))
    before, handles = resource.getrlimit(resource.RLIMIT_NOFILE), []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
        with contextlib.suppress(OSError):
            while True:
                handles.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(6):  # with room for none, for one, ...
            with contextlib.suppress(UserError):
                try:
                    load(out)
                except UserError as error:
                    told.add(str(error))
                    raise
            os.close(handles.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in handles:
            os.close(handle)
    assert told and not any("delete" in each or "damaged" in each for each in told), told
    whole_again(out)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become a user without rights")
def test_another_user_without_rights_is_told_so(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    save(out, run_at(5))
    (out / AT5).chmod(0o700)
    for folder in (out, *out.parents):
        folder.chmod(folder.stat().st_mode | 0o055)
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.setuid(65534)
        try:
            load(out)
        except UserError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told = pipe.read()
    assert "cannot be read (Permission denied)" in told and "delete" not in told, told
    whole_again(out)


@pytest.mark.parametrize("name", ["_checked", "_read_state", "_check_tensors"])
@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, ValueError])
def test_a_mistake_of_ours_is_no_damage(saved, name, error):
    with mock.patch.object(saving, name, side_effect=error("a mistake")), pytest.raises(error):
        load(saved)


@pytest.mark.parametrize("size", [301, 400])
def test_a_tokenizer_with_more_ids_than_the_model_has_rows_is_refused(size, tmp_path):
    """Under whatever digests, and with `python -O` as well: no assertion is what holds it."""
    other = Tokenizer.train(RIVER.read_bytes(), size)
    assert other.vocab_size == size
    config = replace(CONFIG, vocab_size=300)
    with pytest.raises(UserError, match=f"of at most 300 ids, .* but it has {size}"):
        Run.begin(config, Settings(steps=9), other, "digest")
    fitting = replace(CONFIG, vocab_size=size)
    run = Run.begin(fitting, Settings(steps=9), other, "digest")
    run.config, run.weights = config, initialise(config, 0)
    run.optimizer = AdamW(run.weights)
    save(tmp_path / "run", run)  # and signed, as by somebody who means it
    for reader in (load, load_model):
        with pytest.raises(UserError, match=f"of at most 300 ids, .* but it has {size}"):
            reader(tmp_path / "run")


FORMAT1 = Path(__file__).parent / "helpers" / "format-1"  # written by the version before format 2


def test_a_run_of_the_format_before_goes_on(tmp_path, capsys):
    out = shutil.copytree(FORMAT1, tmp_path / "run")
    assert "format" not in json.loads((out / "config.json").read_text())
    run = load(out)
    assert (run.step, run.settings.steps, run.settings.lr) == (3, 3, 0.01)
    assert load_model(out)[0] == run.config
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3]
    # an earlier step of it, so that something is left to do: its next save must fit to config.json
    run.step, run.settings = 2, replace(run.settings, minutes=7.0)
    shutil.rmtree(out / "step-00000003")
    save(out, run)
    assert load(out).step == 2
    loop._note_program(out, run, "reference")  # its batches had another order
    assert "code 5cf30ba6cfd436aa, now None" in capsys.readouterr().err
    record = json.loads((saved_config := out / "config.json").read_text())
    saved_config.write_text(json.dumps(record | {"format": 7}))
    with pytest.raises(UserError, match="a run of format 7, .* formats up to 6: use a newer one"):
        load(out)


def test_config_json_says_its_format(saved):
    record = json.loads((saved / "config.json").read_text())
    assert record["format"] == saving.FORMAT == 2 and record["training"]["minutes"] == 5.0


@given(data=st.data(), name=st.sampled_from(FILES))
@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_truncated_files_are_refused(saved, tmp_path_factory, data, name):
    out = shutil.copytree(saved, tmp_path_factory.mktemp("cut") / "run")
    whole = (saved / name).read_bytes()
    end = data.draw(st.integers(0, len(whole) - 1))
    (out / name).write_bytes(whole[:end])
    if name.endswith(("config.json", "state.json")) and end == len(whole) - 1:
        assert same(load(out), run_at(4))  # only the newline at the end is gone
    elif name == "tokenizer.json" and whole[:end].strip() == whole.strip():
        load(out)  # likewise
    else:
        refused(out)


@given(data=st.data(), name=st.sampled_from(FILES))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_bytes_changed_at_random_never_crash(saved, tmp_path_factory, data, name):
    """Whatever is changed, the answer is a run or a UserError. Headers are hit most."""
    out = shutil.copytree(saved, tmp_path_factory.mktemp("flip") / "run")
    changed = bytearray((saved / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 1500) - 1))] = data.draw(
            st.integers(0, 255)
        )
    (out / name).write_bytes(changed)
    try:
        back = load(out)
    except UserError as error:
        assert str(error).isprintable()
    else:
        assert same(back, run_at(4)) and back.settings == run_at(4).settings


@given(data=st.data(), name=st.sampled_from(LARGE))
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_hostile_bytes_under_a_digest_that_fits(saved, tmp_path_factory, data, name):
    """As above, by somebody who also writes the digest of what they wrote."""
    out = shutil.copytree(saved, tmp_path_factory.mktemp("hostile") / "run")
    changed = bytearray((saved / AT4 / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, min(len(changed), 1500) - 1))] = data.draw(
            st.integers(0, 255)
        )
    (out / AT4 / name).write_bytes(changed)
    reseal(out)
    try:
        assert np.isfinite(load(out).weights.flat).all()
    except UserError as error:
        assert str(error).isprintable()


def reseal(out, **changes):
    """Make state.json agree with the files as they are, and with config.json; then `changes`."""
    state = state_of(out)
    for name in state["sha256"]:
        content = (out / AT4 / name).read_bytes()
        state["sha256"][name] = hashlib.sha256(content).hexdigest()
    record = json.loads((out / "config.json").read_text())
    state["run"] = identity(record) if type(record["training"]) is dict else ""
    (out / AT4 / "state.json").write_text(json.dumps({**state, **changes}))


def edit(out, name, change):
    tensors = load_file(out / AT4 / f"{name}.safetensors")
    change(tensors)
    save_file(tensors, out / AT4 / f"{name}.safetensors")
    reseal(out)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model", lambda t: t["norm"].__setitem__(1, np.nan), "norm is not finite"),
        ("model", lambda t: t["output"].__setitem__((1, 1), np.inf), "output is not finite"),
        ("optimizer", lambda t: t["m.norm"].__setitem__(1, np.nan), "m.norm is not finite"),
        ("optimizer", lambda t: t["v.norm"].__setitem__(1, -1), "v.norm .* mean of squares below"),
        ("model", lambda t: t.pop("norm"), "norm to be .*F32.* found nothing"),
        ("model", lambda t: t.update(extra=np.zeros(3)), "extra to be nothing, found .*F64"),
        ("model", lambda t: t.update({"a\n\x1b[31m": np.zeros(3)}), "to be nothing, found"),
        ("model", lambda t: t.update(norm=np.zeros(9, np.float32)), r"norm to be .*\(8,\).*\(9,\)"),
        ("model", lambda t: t.update(norm=np.zeros(8, np.float64)), "norm .*F32.* found .*F64"),
        ("model", lambda t: t.update(norm=np.zeros((8, 1), np.float32)), r"found .*\(8, 1\)"),
    ],
)
def test_wrong_tensors_are_refused(saved, tmp_path, name, change, words):
    out = shutil.copytree(saved, tmp_path / "run")
    edit(out, name, change)
    refused(out, words)


def test_a_pair_of_two_steps_is_refused(saved, tmp_path):
    other = tmp_path / "other"
    save(other, run_at(5))
    for name in LARGE:
        out = shutil.copytree(saved, tmp_path / name)
        shutil.copy(other / AT5 / name, out / AT4)
        refused(out, f"{name} is not the file that was saved")
    out = shutil.copytree(saved, tmp_path / "renamed")
    os.rename(out / AT4, out / AT5)
    refused(out, "state.json has step 4")


def test_another_tokenizer_is_refused(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    Tokenizer.train(b"another text altogether, " * 50, 270).save(out / "tokenizer.json")
    refused(out, "expected the tokenizer .* found")
    with pytest.raises(UserError, match="expected the tokenizer"):
        load_model(out)
    (out / "tokenizer.json").unlink()
    refused(out)


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("data",), 7), (("data",), "a\nb"), (("tokenizer",), None), (("model",), []),
        (("training",), "fast"),
        (("model", "n_layers"), 10**12), (("model", "dim"), 10**9), (("model", "dim"), 8.5),
        (("model", "repeat"), 10**12), (("model", "context"), 10**12),
        (("model", "vocab_size"), 2**62), (("model", "surprise"), 1), (("training", "lr"), "high"),
        (("model", "sur\nprise"), 1), (("training", "lr"), -1), (("training", "steps"), 1.5),
        (("training", "steps"), 3), (("training", "beta2"), 1), (("training", "seed"), -1),
        (("training", "lr"), float("nan")), (("training", "warmup"), None),
        (("training", "steps"), 10**400), (("training", "lr"), 10**400),
        (("training", "accumulate"), 0), (("training", "accumulate"), 17),
        (("training", "steps"), None), (("model", "hidden"), "8"), (("format",), 3),
        (("format",), "2"), (("format",), True), (("format",), 10**400), (("format",), -1),
        (("format",), 1), (("training", "minutes"), 0.0), (("training", "minutes"), "5"),
    ],
)  # fmt: skip
def test_hostile_records_are_refused_at_once(saved, tmp_path, where, value):
    out = shutil.copytree(saved, tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    *path, last = where
    inner = record
    for key in path:
        inner = inner[key]
    inner[last] = value
    (out / "config.json").write_text(json.dumps(record))
    if where == ("model", "context"):  # no tensor knows it: refused as that of another run
        refused(out, "are from different runs")
    elif where == ("model",):  # no digest can be made of it
        refused(out)
    else:
        reseal(out)
        refused(out)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1), ("step", "4"), ("step", 10), ("step", 10**400), ("step", True),
        ("step", 4.0), ("step", None),
        ("run", 7), ("run", "0" * 16), ("tokenizer", None),
        ("program", None), ("program", {"code": "\x1b[2J"}), ("program", {"code": "0" * 1000}),
        ("program", {"\n": "0"}), ("program", []), ("sha256", {}),
        ("sha256", []),
        ("sha256", {name: "" for name in LARGE}),
    ],
)  # fmt: skip
def test_hostile_states_are_refused(saved, tmp_path, name, value):
    out = shutil.copytree(saved, tmp_path / "run")
    reseal(out, **{name: value})
    refused(out)


def test_records_that_are_no_objects_are_refused(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    for name in ("config.json", f"{AT4}/state.json"):
        before = (out / name).read_bytes()
        for text in ("", "[]", "7", "null", "[" * 100_000, '{"step": 4}', "\x00", "é"):
            (out / name).write_bytes(text.encode("latin1"))
            refused(out)
        (out / name).write_bytes(before)
    assert same(load(out), run_at(4))


@pytest.mark.parametrize("name", FILES)
def test_a_pipe_or_a_device_in_place_of_a_file_is_refused(saved, tmp_path, name):
    """Which would be waited for, or read, for ever."""
    out = shutil.copytree(saved, tmp_path / "run")
    (out / name).unlink()
    os.mkfifo(out / name)
    refused(out, "is a pipe or a device")
    (out / name).unlink()
    (out / name).symlink_to("/dev/zero")
    refused(out, "is a pipe or a device")


@pytest.mark.parametrize("where", [(), ("training",)])
def test_a_record_of_one_format_with_the_fields_of_another_is_refused(saved, tmp_path, where):
    """format was left out, or minutes. Other minutes, which decide nothing, are no other run."""
    out = shutil.copytree(saved, tmp_path / "run")
    record = json.loads((out / "config.json").read_text())
    (record["training"] if where else record).pop("minutes" if where else "format")
    (out / "config.json").write_text(json.dumps(record))
    reseal(out)
    refused(out, "its format and its minutes do not fit")
    record = json.loads((saved / "config.json").read_text())
    record["training"]["minutes"] = 7.5
    (out / "config.json").write_text(json.dumps(record))
    assert same(load(out), run_at(4))


@pytest.mark.parametrize("name", LARGE)
def test_a_header_that_names_a_tensor_twice_is_refused(saved, tmp_path, name):
    """Of two descriptions readers take the one that they like; ours would be the last."""
    out = shutil.copytree(saved, tmp_path / "run")
    path = out / AT4 / name
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    first = json.dumps(dict(list(header.items())[:1]))[1:-1]
    text = ("{" + first + "," + json.dumps(header)[1:]).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    reseal(out)
    refused(out, "twice")


def test_metrics_lose_their_torn_end_and_the_steps_that_come_again(saved, tmp_path):
    out = shutil.copytree(saved, tmp_path / "run")
    for step in range(1, 7):
        add_metrics(out, {"step": step, "loss": 1 / step})
    with open(out / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "lo')
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5, 6]
    rewind(out, load(out))
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4]
    assert (out / "metrics.jsonl").read_text().endswith("}\n")


@pytest.mark.parametrize(
    "line",
    [
        "[" * 100_000, "null", "[]", "{}", '{"step": 2}', '{"step": -1, "loss": 1}',
        '{"step": "2", "loss": 1}', '{"step": 2, "loss": "x"}', '{"step": 2, "loss": NaN}',
        '{"step": 2, "loss": 1, "bits_per_byte": []}', f'{{"step": 2, "loss": {"9" * 400}}}',
        '{"step": 2, "loss": 1, "sample": "\udcff"}',
    ],
)  # fmt: skip
def test_metrics_that_nobody_here_wrote_end_the_reading(line, tmp_path):
    add_metrics(tmp_path, {"step": 1, "loss": 2.0})
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(line.encode(errors="surrogateescape") + b"\n")
    assert [line["step"] for line in read_metrics(tmp_path)] == [1]


def test_settings_say_what_they_expect():
    for name, value, words in (
        ("steps", 0, "a whole number above 0, got 0"),
        ("batch_size", 2.0, "a whole number above 0, got 2.0"),
        ("lr", float("inf"), "a number above 0 and at most 1.79.*, got inf"),
        ("seed", -1, "a whole number of at least 0, got -1"),
        ("weight_decay", -0.1, "of at least 0"),
        ("beta2", 1.5, "below 1"),
        ("lr", float("nan"), "a number above 0, got nan"),
        ("seed", 2**63, "of at least 0 and at most 9223372036854775807, got"),
        ("lr", 10**400, "a number above 0"),
        ("steps", 10**5000, "a whole number above 0 and at most 9223372036854775807, got inf$"),
        ("steps", "x" * 5000, r"a whole number above 0, got 'x{96}\.\.\.$"),
        ("minutes", 1e300, r"at most 525,600, which is a year, got 1e\+300"),
    ):
        with pytest.raises(UserError, match=f"{name} to be .*{words}"):
            Settings(**{name: value})
    assert Settings(lr=1).lr == 1
    with pytest.raises(UserError, match="accumulate to be at most batch_size 4, got 5"):
        Settings(batch_size=4, accumulate=5)
    assert Settings(batch_size=17, accumulate=4).accumulate == 4  # 4 does not divide 17
    assert Settings().steps is None
    for minutes in (0, -1, float("nan"), "5", None):
        with pytest.raises(UserError, match="minutes to be a number above 0"):
            Settings(minutes=minutes)

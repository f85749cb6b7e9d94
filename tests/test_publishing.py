"""What the executor promises when something goes wrong: kills, full disks, locks, other plans, other runs."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

import support
from surgery.checkpoint import Checkpoint
from surgery.draft import draft_of
from surgery.errors import OutputError, SourceError, UsageError
from surgery.execute import Options, execute
from surgery.operations.recipe import run_recipe
from surgery.operations.repack import Repack
from surgery.operations.trim import Trim
from surgery.plan import make_plan
from surgery.plan_types import Plan


def plan_for(source: Path, *operations) -> Plan:
    return make_plan(run_recipe(draft_of(Checkpoint.open(source)), operations or (Trim("0,4,2"), Repack("20kB"))))


def tree(directory: Path) -> dict[str, str]:
    """Every file below `directory` and the digest of its bytes."""
    return {
        path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def source(tiny_model, tmp_path) -> Path:
    """A copy of a tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model("llama"), tmp_path / "source"))


def crash_at(call: int, plan: Plan, out: Path, **options) -> bool:
    """Run the plan in a child that kills itself at its `call`-th write, sync or rename; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        counted = [0]

        def counting(function):
            def wrapped(*arguments, **keywords):
                counted[0] += 1
                if counted[0] == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)

            return wrapped

        for name in ("pwrite", "write", "fsync", "fdatasync", "rename", "ftruncate", "mkdir", "unlink"):
            setattr(os, name, counting(getattr(os, name)))
        try:
            execute(plan, out, Options(**options))
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_killed_at_every_write_boundary_nothing_is_published_and_a_rerun_is_identical(source, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.engine.worker.JOURNAL_EVERY_NBYTES", 20_000)
    monkeypatch.setattr("surgery.engine.groups.UNIT_NBYTES", 10_000)
    plan = plan_for(source)
    execute(plan, tmp_path / "whole")
    expected = tree(tmp_path / "whole")
    boundaries = 0
    for call in range(1, 10_000):
        out = tmp_path / f"out{call}"
        crashed = crash_at(call, plan, out, workers=1)
        if out.exists():
            # The publishing rename is the last of the calls: from then on the output is whole.
            assert tree(out) == expected
        execute(plan, out, Options(workers=2))
        assert tree(out) == expected
        shutil.rmtree(out)
        if not crashed:
            break
        boundaries += 1
    assert boundaries > 30


def test_killed_again_and_again_the_same_run_ends_identical(source, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.engine.worker.JOURNAL_EVERY_NBYTES", 10_000)
    monkeypatch.setattr("surgery.engine.groups.UNIT_NBYTES", 5_000)
    plan = plan_for(source)
    execute(plan, tmp_path / "whole")
    out = tmp_path / "out"
    for call in range(20, 4_000, 9):
        if not crash_at(call, plan, out, workers=1):
            break
    assert execute(plan, out).digest
    assert tree(out) == tree(tmp_path / "whole")


def test_a_resumed_run_does_again_only_what_was_not_flushed(source, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.engine.worker.JOURNAL_EVERY_NBYTES", 1)
    monkeypatch.setattr("surgery.engine.groups.UNIT_NBYTES", 1)
    plan = plan_for(source)
    assert crash_at(80, plan, tmp_path / "out", workers=1)
    outcome = execute(plan, tmp_path / "out", Options(readback=True))
    assert 0 < outcome.resumed < plan.totals.tensors_out
    assert outcome.nbytes_written < plan.totals.nbytes_out


def test_a_torn_journal_and_a_truncated_file_are_done_again(source, tmp_path, monkeypatch):
    monkeypatch.setattr("surgery.engine.worker.JOURNAL_EVERY_NBYTES", 1)
    monkeypatch.setattr("surgery.engine.groups.UNIT_NBYTES", 1)
    plan = plan_for(source)
    execute(plan, tmp_path / "whole")
    assert crash_at(120, plan, tmp_path / "out", workers=1)
    staging = tmp_path / ".out.surgery-partial"
    journal = staging / "journal.0"
    journal.write_bytes(journal.read_bytes()[:-7] + b"\xff\x00garbage")
    os.truncate(staging / "content" / plan.files[0].name, 100)
    execute(plan, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_the_same_command_gives_the_same_bytes_whatever_the_workers(source, tmp_path):
    plan = plan_for(source)
    trees = []
    for workers in (1, 2, 5):
        execute(plan, tmp_path / f"out{workers}", Options(workers=workers, memory_nbytes=workers << 20))
        trees.append(tree(tmp_path / f"out{workers}"))
    assert trees[0] == trees[1] == trees[2]
    for seed in ("0", "1"):
        out = tmp_path / f"seed{seed}"
        arguments = ("trim", source, out, "--layers", "0,4,2", "--max-shard-size", "20kB")
        assert support.run_surgery(*arguments, env={"PYTHONHASHSEED": seed}).returncode == 0
        assert tree(out) == trees[0] | {name: tree(out)[name] for name in ("surgery.json", "README.md")}
    assert tree(tmp_path / "seed0") == tree(tmp_path / "seed1")


def test_a_rerun_after_success_says_so_and_exits_0(source, tmp_path):
    first = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,2")
    again = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,2")
    assert (first.returncode, again.returncode) == (0, 0)
    assert "already" in again.stdout
    other = support.run_surgery("trim", source, tmp_path / "out", "--layers", "1,3")
    assert other.returncode == 4
    assert [line.split(":")[0] for line in other.stderr.splitlines()] == ["error", "where", "mend"]


def test_another_plan_in_the_staging_directory_is_refused(source, tmp_path):
    crash_at(60, plan_for(source), tmp_path / "out", workers=1)
    staging = tmp_path / ".out.surgery-partial"
    (staging / "journal.0").write_text('{"plan": "another"}\n' + "3 " + "ab" * 16 + "\n")
    before = tree(staging)
    with pytest.raises(OutputError, match="another plan"):
        execute(plan_for(source), tmp_path / "out")
    assert tree(staging) == before


def test_files_of_another_plan_that_finished_nothing_are_not_built_on(tmp_path):
    """Same names, sizes and headers, other bytes; in sparse outputs holes are not written over."""
    source = big_sparse(tmp_path / "source", 1 << 20)
    plan = plan_for(source, Repack())
    execute(plan, tmp_path / "whole")
    assert crash_at(5, plan, tmp_path / "out", workers=1)
    staged = tmp_path / ".out.surgery-partial" / "content" / plan.files[0].name
    data = bytearray((tmp_path / "whole" / plan.files[0].name).read_bytes())
    data[2000:2010] = b"0123456789"
    staged.write_bytes(data)
    (tmp_path / ".out.surgery-partial" / "plan").write_text("of another plan")
    execute(plan, tmp_path / "out")
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_a_filesystem_that_tells_no_holes_has_none(tmp_path, monkeypatch):
    source = big_sparse(tmp_path / "source", 1 << 20)
    seek = os.lseek

    def no_holes(descriptor, offset, how):
        if how in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(22, "Invalid argument")
        return seek(descriptor, offset, how)

    plan = plan_for(source, Repack())
    with monkeypatch.context() as patch:
        patch.setattr(os, "lseek", no_holes)
        execute(plan, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes().endswith(b"the last 16 byte")


def test_two_runs_at_once_are_refused_by_the_lock(source, tmp_path):
    staging = tmp_path / ".out.surgery-partial"
    staging.mkdir()
    with (staging / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        result = support.run_surgery("trim", source, tmp_path / "out", "--layers", "0")
    assert result.returncode == 4
    assert "another run" in result.stderr


@pytest.mark.parametrize("change", ["truncate", "swap header", "remove"])
def test_a_source_that_changed_since_the_plan_is_refused(source, tmp_path, change):
    plan = plan_for(source)
    victim = source / plan.sources[1].name
    if change == "truncate":
        os.truncate(victim, victim.stat().st_size - 1)
    elif change == "swap header":
        victim.write_bytes(victim.read_bytes().replace(b'"format":"pt"', b'"format":"pp"'))
    else:
        victim.unlink()
    with pytest.raises(SourceError):
        execute(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_source_that_shrinks_while_it_is_read_is_an_error_not_a_crash(source, tmp_path, monkeypatch):
    plan = plan_for(source)
    victim = source / plan.sources[-1].name
    from surgery import execute as module

    checked = module._Run.check_sources
    monkeypatch.setattr(module._Run, "check_sources", lambda run: (checked(run), os.truncate(victim, 64)))
    with pytest.raises(SourceError, match="it changed"):
        execute(plan, tmp_path / "out")


@pytest.mark.parametrize("out", ["source", "source/inner", "source/inner/deeper", ".", "link", "link/inner"])
def test_an_output_in_or_around_the_source_is_a_usage_error(source, tmp_path, out):
    (tmp_path / "link").symlink_to(source)
    before = tree(source)
    with pytest.raises(UsageError):
        execute(plan_for(source), tmp_path / out)
    assert tree(source) == before


def test_a_file_hard_linked_to_the_source_is_never_written(source, tmp_path):
    out = tmp_path / "out"
    execute(plan_for(source), out)
    name = plan_for(source).files[0].name
    (out / name).unlink()
    os.link(source / plan_for(source).sources[0].name, out / name)
    before = tree(source)
    execute(plan_for(source, Trim("3")), out, Options(overwrite=True))
    assert tree(source) == before


def test_nothing_is_created_or_changed_in_the_source(source, tmp_path):
    def look() -> dict[str, tuple[int, int, int]]:
        return {p.name: (p.stat().st_mode, p.stat().st_mtime_ns, p.stat().st_size) for p in [source, *source.iterdir()]}

    for path in source.iterdir():
        path.chmod(0o444)
    source.chmod(0o555)
    before = look()
    for arguments in (("trim", source, tmp_path / "out", "--layers", "0,1"), ("inspect", source)):
        assert support.run_surgery(*arguments).returncode == 0
    assert look() == before
    source.chmod(0o755)


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o002])
def test_files_have_the_mode_that_the_umask_says(source, tmp_path, umask):
    subprocess.run(
        support.surgery_command("trim", source, tmp_path / "out", "--layers", "0"),
        check=True,
        env=support.surgery_environment(),
        preexec_fn=lambda: os.umask(umask),
        capture_output=True,
    )
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()}
    assert modes == {0o666 & ~umask}
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o777 & ~umask


def test_overwrite_replaces_what_surgery_wrote_and_keeps_its_modes(source, tmp_path):
    out = tmp_path / "out"
    execute(plan_for(source, Trim("0-5"), Repack("20kB")), out)
    (out / "config.json").chmod(0o640)
    with pytest.raises(OutputError, match="exists"):
        execute(plan_for(source, Trim("1")), out)
    execute(plan_for(source, Trim("1")), out, Options(overwrite=True))
    execute(plan_for(source, Trim("1")), tmp_path / "clean")
    assert tree(out) == tree(tmp_path / "clean")
    assert stat.S_IMODE((out / "config.json").stat().st_mode) == 0o640
    assert not list(tmp_path.glob(".*partial"))


@pytest.mark.parametrize("foreign", ["notes.txt", "sub/notes.txt", "model.fp16.safetensors"])
def test_overwrite_refuses_where_anything_foreign_is(source, tmp_path, foreign):
    out = tmp_path / "out"
    execute(plan_for(source), out)
    (out / foreign).parent.mkdir(exist_ok=True)
    (out / foreign).write_text("mine")
    before = tree(out)
    with pytest.raises(OutputError, match="other files"):
        execute(plan_for(source, Trim("1")), out, Options(overwrite=True))
    assert tree(out) == before


def test_a_killed_overwrite_leaves_the_old_output_whole(source, tmp_path):
    out = tmp_path / "out"
    old, new = plan_for(source), plan_for(source, Trim("1"))
    execute(new, tmp_path / "new")
    execute(old, out)
    before = tree(out)
    for call in range(1, 10_000, 5):
        crashed = crash_at(call, new, out, workers=1, overwrite=True)
        assert tree(out) in (before, tree(tmp_path / "new"))
        if not crashed:
            break
    assert tree(out) == tree(tmp_path / "new")


def test_a_directory_or_file_in_the_way_is_refused(source, tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "dangling", "missing/parent/out"):
        with pytest.raises(OutputError):
            execute(plan_for(source), tmp_path / name)
    execute(plan_for(source), tmp_path / "empty")
    assert (tmp_path / "empty" / "surgery.json").is_file()


@pytest.fixture
def small_disk(tmp_path):
    """A tmpfs of 600 kB; skipped where the machine does not let us mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount a tmpfs")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_too_small_is_refused_before_anything_is_written(tiny_model, small_disk):
    source = tiny_model("llama", layers=6, vocab_size=4000)
    result = support.run_surgery("repack", source, small_disk / "out")
    assert result.returncode == 4
    assert "bytes" in result.stderr
    assert not [path for path in small_disk.rglob("*") if path.is_file() and path.stat().st_size > 1000]


def test_a_disk_that_fills_up_on_the_way_is_one_clear_error(tiny_model, small_disk, monkeypatch):
    source = tiny_model("llama", layers=6, vocab_size=4000)
    monkeypatch.setattr("surgery.engine.output_files.free_nbytes", lambda path: None)
    with pytest.raises(OutputError, match="No space left"):
        execute(plan_for(source, Repack()), small_disk / "out")
    assert not list(small_disk.iterdir())


def test_an_output_that_is_a_mount_point_is_filled_in_place(source, small_disk, tmp_path):
    plan = plan_for(source)
    execute(plan, tmp_path / "whole")
    for call in range(1, 10_000, 3):
        crashed = crash_at(call, plan, small_disk, workers=1)
        assert (
            not (small_disk / "surgery.json").exists()
            or not crashed
            or tree(small_disk).items() >= tree(tmp_path / "whole").items()
        )
        if not crashed:
            break
    assert tree(small_disk) == tree(tmp_path / "whole")
    for path in sorted(small_disk.rglob("*")):
        path.unlink()
    for call in range(40, 400, 17):
        crash_at(call, plan, small_disk, workers=1)
    execute(plan, small_disk)
    assert tree(small_disk) == tree(tmp_path / "whole")
    execute(plan_for(source, Trim("1")), small_disk, Options(overwrite=True))
    execute(plan_for(source, Trim("1")), tmp_path / "other")
    assert tree(small_disk) == tree(tmp_path / "other")


def test_thirty_two_file_descriptors_are_enough(tiny_model, tmp_path):
    source = tiny_model("qwen3_moe", layers=12)
    assert len(list(source.glob("*.safetensors"))) > 20
    result = support.run_surgery(
        "repack",
        source,
        tmp_path / "out",
        "--max-shard-size",
        "8kB",
        "--workers",
        "4",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32)),
    )
    assert result.returncode == 0, result.stderr
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 40


def test_a_small_address_space_is_enough(source, tmp_path):
    result = support.run_surgery(
        "trim",
        source,
        tmp_path / "out",
        "--layers",
        "0,5",
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (256 << 20, 256 << 20)),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_with_its_code_and_the_rerun_finishes(tmp_path, number, code):
    source = big_sparse(tmp_path / "source", 64 << 30)
    process = subprocess.Popen(
        support.surgery_command("repack", source, tmp_path / "out"),
        env=support.surgery_environment(),
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and what it starts inherits that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    staging = tmp_path / ".out.surgery-partial" / "content" / "model.safetensors"
    while not staging.exists() and process.poll() is None:
        time.sleep(0.01)
    time.sleep(0.2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == code, stderr
    assert "run the same command again" in stderr
    assert not (tmp_path / "out").exists()


def big_sparse(directory: Path, nbytes: int) -> Path:
    """One U8 tensor of `nbytes` whose last bytes are not zero, in a sparse file."""
    directory.mkdir()
    entry = {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}
    header = json.dumps({"w": entry}).encode()
    header += b" " * (-len(header) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
        file.seek(-16, os.SEEK_END)
        file.write(b"the last 16 byte")
    return directory


def test_a_tensor_over_two_gibibytes_arrives_whole_and_holes_stay_holes(tmp_path):
    nbytes = 2**31 + 8192
    source = big_sparse(tmp_path / "source", nbytes)
    assert support.run_surgery("rename", source, tmp_path / "out", "--map", "w=v").returncode == 0
    result = tmp_path / "out" / "model.safetensors"
    with result.open("rb") as file:
        file.seek(-16, os.SEEK_END)
        assert file.read() == b"the last 16 byte"
    assert result.stat().st_size >= nbytes
    assert result.stat().st_blocks * 512 < 1 << 20


def test_reads_go_in_source_order_in_long_blocks_each_byte_once(source, tmp_path, monkeypatch):
    from surgery.engine.reading import SourceRange

    reads = []
    fill = SourceRange.fill
    monkeypatch.setattr(
        SourceRange, "fill", lambda self, into, at: (reads.append((self._path, at, len(into))), fill(self, into, at))
    )
    plan = plan_for(source, Repack())
    execute(plan, tmp_path / "out", Options(workers=1))
    assert reads == sorted(reads)
    assert sum(nbytes for _, _, nbytes in reads) == plan.totals.nbytes_in
    assert len(reads) == len(plan.sources)


def test_a_full_standard_output_is_an_error_and_a_closed_one_is_not(source):
    with Path("/dev/full").open("w") as full:
        result = support.run_surgery("trim", source, source.parent / "out", "--layers", "0", "--dry-run", stdout=full)
    assert result.returncode == 4, result.stderr
    assert "Traceback" not in result.stderr
    shell = f"{shlex.quote(sys.executable)} -m surgery inspect {source} --tensors | head -1"
    piped = subprocess.run(
        ["bash", "-o", "pipefail", "-c", shell], env=support.surgery_environment(), capture_output=True, text=True
    )
    assert "Traceback" not in piped.stderr
    assert piped.returncode == 0


def test_values_survive_bit_for_bit_whatever_they_are(tmp_path):
    """NaN payloads, negative zero, odd booleans (case F20)."""
    source = tmp_path / "source"
    source.mkdir()
    words = {"BF16": bytes.fromhex("817f81ffc17f0080"), "F16": bytes.fromhex("017c"), "BOOL": bytes.fromhex("02ff")}
    from surgery.safetensors_file import build_header

    shapes = {"BF16": (4,), "F16": (1,), "BOOL": (2,)}
    header, placed = build_header([(dtype, dtype, shape) for dtype, shape in shapes.items()], {})
    (source / "model.safetensors").write_bytes(header + b"".join(words[name] for name, _ in placed))
    result = support.run_surgery("rename", source, tmp_path / "out", "--map", "BOOL=flags")
    assert result.returncode == 0, result.stderr
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    assert data.endswith(b"".join(words[name] for name, _ in placed))


def test_safetensors_reads_what_was_written(source, tmp_path):
    execute(plan_for(source), tmp_path / "out")
    tensors = {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        tensors.update(load_file(path))
    assert len(tensors) == plan_for(source).totals.tensors_out

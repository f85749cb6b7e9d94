"""`surgery inspect` on DeepSeek-V3 in its real size: one screen, seconds, little memory, and a reader that leaves."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

from support import run_surgery, surgery_command, surgery_environment


def test_the_largest_model_fits_one_screen_quickly_and_in_little_memory(sparse_deepseek_v3: Path) -> None:
    started = time.monotonic()
    text = run_surgery("inspect", sparse_deepseek_v3).stdout
    assert time.monotonic() - started < 10, "2 s when the machine is free"
    assert len(text.splitlines()) <= 45
    assert "3-60  moe 256 experts top-8 + 1 shared, latent attention (MLA); 11.5 GB a layer" in text
    assert "MTP 1 stage (model.layers.61)" in text
    assert "findings    none" in text
    script = (
        "import sys; from surgery.cli.main import run; code = run(sys.argv[1:]); "
        # Not getrusage: its peak begins with that of the process that forked this one.
        "peak = next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')); "
        "print(code, peak, [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    command = [*surgery_command()[:1], "-c", script, "inspect", str(sparse_deepseek_v3)]
    result = subprocess.run(command, env=surgery_environment(), capture_output=True, text=True, check=True)
    code, peak, heavy = result.stderr.split(maxsplit=2)
    assert (code, heavy.strip()) == ("0", "[]")
    assert int(peak) < 150_000, "kB"


def test_a_reader_that_leaves_early_is_no_failure(sparse_deepseek_v3: Path) -> None:
    for arguments in (["--tensors"], []):
        command = " ".join(surgery_command("inspect", sparse_deepseek_v3, *arguments))
        result = subprocess.run(
            ["bash", "-o", "pipefail", "-c", f"{command} | head -1"],
            env=surgery_environment({"PYTHONUNBUFFERED": "1"}),
            capture_output=True,
            text=True,
        )
        assert (result.returncode, result.stderr) == (0, "")
        assert len(result.stdout.splitlines()) == 1

"""The public API is what `surgery.__all__` says, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import support
import surgery


def test_every_public_name_is_there_and_is_no_module():
    for name in surgery.__all__:
        assert not isinstance(getattr(surgery, name), type(sys)), name
    assert set(surgery._HOME) == set(surgery.__all__)


def test_the_example_of_the_package_runs(tiny_model, tmp_path):
    text = surgery.__doc__
    code = "\n".join(line.strip() for line in text.splitlines() if line.startswith("    "))
    code = code.replace('"SRC"', repr(str(tiny_model("llama")))).replace('"OUT"', repr(str(tmp_path / "out")))
    code = code.replace("0,6,7", "0,2,5")
    prelude = "from pathlib import Path\nimport surgery.verify, surgery.execute\n"
    subprocess.run([sys.executable, "-c", prelude + code], env=support.surgery_environment(), check=True)
    assert Path(tmp_path / "out" / "surgery.json").is_file()

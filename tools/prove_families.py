"""Write tests/proven_families.md: which model types were proven how, from a run made now.

python tools/prove_families.py
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

HEAD = """# Which model types are proven how

Written by `tools/prove_families.py` from its run with transformers {version}; `tests/test_zoo.py` repeats it. A tiny
model of the type is made by transformers' own class and trimmed to layers that are no prefix. Proven means: it loads
with nothing missing, left over or misshapen; float32 logits are bit-equal to the model cut in memory; and each layer
of the new skeleton has the classes, shapes and attributes of the layer it came from.

| model type | kinds of layers | layers kept, of 6 | result |
|---|---|---|---|
"""


def main() -> None:
    import proving
    import transformers

    from surgery.families.records import known_types

    rows = {}
    zoo = proving.zoo_kinds()
    for kind in known_types():
        if kind not in zoo:
            reason = proving.UNPROVEN.get(kind, "a text decoder of a wrapper; proven inside it")
            rows[kind] = f"| `{kind}` | | | {reason} |"
            continue
        with tempfile.TemporaryDirectory() as directory:
            try:
                proof = proving.prove(kind, Path(directory))[0]
                how = "proven" if proof.logits else f"proven but for logits: {proving.NO_LOGITS[kind]}"
                how += ": what its layers' numbers mean allows no other" if kind in proving.BOUND else ""
                kept = ", ".join(map(str, proof.kept))
                rows[kind] = f"| `{kind}` | {proof.kinds} | {kept} | {how} |"
            except Exception as error:
                rows[kind] = f"| `{kind}` | | | not proven: {type(error).__name__} {str(error).splitlines()[0][:120]} |"
        print(rows[kind], flush=True)
    text = HEAD.format(version=transformers.__version__) + "\n".join(rows.values()) + "\n"
    (ROOT / "tests" / "proven_families.md").write_text(text)


if __name__ == "__main__":
    main()

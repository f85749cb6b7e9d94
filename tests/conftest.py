"""Models that tests share: built once per session, also across workers. Never write into them; copy first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import make_sparse
import tiny_models

# Before torch is imported (neither module above does): two workers share two cores, and sums run in one order
# so that bits can be compared.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def shared_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory for all workers of this session."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # each worker's base is a child of the session's
    directory = base / "shared"
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def tiny_model(shared_directory: Path) -> Callable[..., Path]:
    """`tiny_model("qwen3_moe", layers=6, num_experts=8)`: the directory of that model, with a tokenizer."""

    def get(family: str, **options: Any) -> Path:
        name = "-".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])

        def build(directory: Path) -> None:
            tiny_models.build(family, directory, **options)
            tiny_models.add_tokenizer(directory)

        return _once(shared_directory / name.replace("/", "_"), build)

    return get


@pytest.fixture(scope="session")
def sparse_qwen3_235b(shared_directory: Path) -> Path:
    """470 GB apparent, 155 MB on disk, a marker in each of 36,945 tensors."""
    return _once(shared_directory / "qwen3-235b", lambda directory: make_sparse.make("qwen3-235b", directory))


@pytest.fixture(scope="session")
def sparse_deepseek_v3(shared_directory: Path) -> Path:
    """689 GB apparent, 364 MB on disk, a marker in each of 91,991 tensors."""
    return _once(shared_directory / "deepseek-v3", lambda directory: make_sparse.make("deepseek-v3", directory))


def _once(directory: Path, build: Callable[[Path], object]) -> Path:
    """Build aside and rename: of two workers that build the same, one wins and both see it whole."""
    if directory.exists():
        return directory
    aside = directory.with_name(f".{directory.name}.{os.getpid()}")
    build(aside)
    try:
        aside.rename(directory)
    except OSError:
        shutil.rmtree(aside)
    return directory

import os
import shutil
import zlib
from pathlib import Path

import pytest
from interop.asking import torch


@pytest.fixture
def record(request, tmp_path):
    """The folder of what transformers says in this test: of its own, or to be kept in $ANDREA_PARITY or found there."""
    kept = os.environ.get("ANDREA_PARITY")
    if not kept and not torch:
        pytest.skip("parity needs pip install 'andrea_jax[parity]', or ANDREA_PARITY=FOLDER of a run that had it")
    if not kept:
        return tmp_path / "record"
    name = f"{request.node.originalname}-{zlib.crc32(request.node.name.encode()):08x}"  # some names are too long
    folder = Path(kept, request.path.stem, name)
    if torch:
        shutil.rmtree(folder, ignore_errors=True)
    return folder

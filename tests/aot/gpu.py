"""Compiling for a GPU that is described, not present. Needs the CUDA plug-in; see .ci/run for the packages."""

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from andrea_jax.inspect.compile_for import compile_for

__all__ = ["assembly", "compile_for", "registers_and_spills"]


def assembly(card, f, *args):
    """The PTX of f compiled for a card: one text for each module with kernels in it."""
    with tempfile.TemporaryDirectory() as folder:
        compile_for(card, f, *args, compiler_options={"xla_dump_to": folder})
        texts = [file.read_text() for file in sorted(Path(folder).glob("*.ptx"))]
    return [text for text in texts if ".entry" in text]


def registers_and_spills(ptx):
    """{kernel: (registers of a thread, bytes spilled)} of PTX, as CUDA's assembler reports them."""
    folder = importlib.util.find_spec("nvidia.cuda_nvcc").submodule_search_locations[0]
    architecture = re.search(r"\.target (\w+)", ptx).group(1)
    command = [Path(folder) / "bin" / "ptxas", "-v", f"-arch={architecture}", "-o", "/dev/null"]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        report = subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stderr
    found = re.findall(r"entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers", report, re.DOTALL)
    return {name: (int(registers), int(spilled)) for name, spilled, registers in found}

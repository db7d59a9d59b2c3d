"""Compilers found and checked once a run, and the commands that build an extension as `torch.utils.cpp_extension` would.

Runs in the pytest process, so torch is not imported: what is needed of it comes as `facts` from the fork server.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import EnvironmentFault
from .request import Request


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Toolchain:
    """What extensions are built with."""

    torch: Path
    """torch's package folder."""
    torch_version: str
    cuda: str | None
    """CUDA version that torch was built with; None for a CPU build."""
    cxx_standard: str
    cxx11_abi: bool
    pybind: tuple[tuple[str, str], ...]
    arch: str | None

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], arch: str | None) -> Toolchain:
        folder = Path(facts["folder"])
        return cls(
            torch=folder,
            torch_version=f"{facts['torch']} {facts['git']}",
            cuda=facts["cuda"],
            cxx_standard=_cxx_standard(folder),
            cxx11_abi=facts["cxx11_abi"],
            pybind=tuple(sorted(facts["pybind"].items())),
            arch=arch,
        )

    def identity(self, request: Request) -> list[str]:
        """Everything beside sources and flags that decides the binary.

        Raises:
            EnvironmentFault: without a compiler that the request needs.
        """
        words = [
            self.torch_version,
            str(self.cuda),
            str(self.cxx11_abi),
            self.cxx_standard,
            str(sysconfig.get_config_var("SOABI")),
            version_of(cxx_compiler()),
        ]
        if request.with_cuda:
            words += [version_of(self.nvcc()), self._arch(request) or "flags"]
        return words

    def nvcc(self) -> str:
        """Path of nvcc in the toolkit that fits torch.

        Raises:
            EnvironmentFault: none, or one of another major version.
        """
        if self.cuda is None:
            raise EnvironmentFault(
                f"a CUDA extension is asked for, but torch {self.torch_version.split()[0]} is a build without CUDA; "
                "install a CUDA build of torch"
            )
        nvcc = str(cuda_root() / "bin" / "nvcc")
        match = re.search(r"release (\d+)\.(\d+)", version_of(nvcc))
        if match and match[1] != self.cuda.split(".")[0]:
            raise EnvironmentFault(
                f"nvcc is of CUDA {match[1]}.{match[2]} ({nvcc}), torch was built with CUDA {self.cuda}; "
                f"put a CUDA {self.cuda.split('.')[0]}.x toolkit on the PATH or set CUDA_HOME"
            )
        return nvcc

    def _arch(self, request: Request) -> str | None:
        """None when the candidate's own flags choose, by torch's rule for that."""
        if any("arch" in flag for flag in request.cuda_cflags if "TORCH_EXTENSION_NAME" not in flag):
            return None
        if self.arch is None:
            raise EnvironmentFault("no CUDA architecture to build for: there is no GPU here; name one with --kb-arch=9.0a")
        return self.arch

    def stages(self, request: Request) -> list[list[list[str]]]:
        """The commands in two stages, compile (side by side) and link; the result is `<name>.so` in the working folder."""
        objects, compile_stage = [], []
        for file, _ in request.sources:
            cuda = file.endswith(".cu")
            target = f"{file}.o"
            objects.append(target)
            compile_stage.append((self._nvcc_command if cuda else self._cxx_command)(request, file, target))
        libraries = [f"-L{self.torch / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        if request.with_cuda:
            root = cuda_root()
            lib = root / "lib64" if (root / "lib64").exists() else root / "lib"
            libraries[2:2] = ["-lc10_cuda"]
            libraries[4:4] = ["-ltorch_cuda"]
            libraries += [f"-L{lib}", "-lcudart"]
        link = [cxx_compiler(), *objects, "-shared", *_words(request.ldflags), *libraries, "-o", f"{request.name}.so"]
        return [compile_stage, [link]]

    def _common(self, request: Request) -> list[str]:
        include = self.torch / "include"
        system = [include, include / "torch" / "csrc" / "api" / "include"]
        if request.with_cuda and (cuda_root() / "include") != Path("/usr/include"):
            system.append(cuda_root() / "include")
        system.append(Path(sysconfig.get_path("include", scheme="posix_prefix")))
        flags = [f"-DTORCH_EXTENSION_NAME={request.name}", "-DTORCH_API_INCLUDE_EXTENSION_H"]
        flags += [f'-DPYBIND11_{name}="{value}"' for name, value in self.pybind]
        flags += [f"-I{path}" for path in request.include_paths]
        for path in system:
            flags += ["-isystem", str(path)]
        return [*flags, f"-D_GLIBCXX_USE_CXX11_ABI={int(self.cxx11_abi)}"]

    def _cxx_command(self, request: Request, file: str, target: str) -> list[str]:
        flags = [*self._common(request), "-fPIC", f"-std=c++{self.cxx_standard}", *_words(request.cflags)]
        return [cxx_compiler(), *flags, "-c", file, "-o", target]

    def _nvcc_command(self, request: Request, file: str, target: str) -> list[str]:
        arch = self._arch(request)
        flags = [
            *self._common(request),
            "-D__CUDA_NO_HALF_OPERATORS__",
            "-D__CUDA_NO_HALF_CONVERSIONS__",
            "-D__CUDA_NO_BFLOAT16_CONVERSIONS__",
            "-D__CUDA_NO_HALF2_OPERATORS__",
            "--expt-relaxed-constexpr",
            *([] if arch is None else arch_flags(arch)),
            "--compiler-options",
            "-fPIC",
            *_words(request.cuda_cflags),
        ]
        if not any(flag.startswith("-std=") for flag in flags):
            flags.append(f"-std=c++{self.cxx_standard}")
        host = ["-ccbin", os.environ["CC"]] if "CC" in os.environ else []
        return [self.nvcc(), *host, *flags, "-c", file, "-o", target]


def arch_flags(arch: str) -> list[str]:
    """`9.0a` or `8.0+PTX` as nvcc's `-gencode` flags."""
    version = arch.removesuffix("+PTX").replace(".", "")
    flags = [f"-gencode=arch=compute_{version},code=sm_{version}"]
    if arch.endswith("+PTX"):
        flags.append(f"-gencode=arch=compute_{version},code=compute_{version}")
    return flags


def _words(flags: tuple[str, ...]) -> list[str]:
    """Ninja hands a flag such as `-Xcompiler -O3` to a shell, so one string may be several words."""
    import shlex

    return [word for flag in flags for word in shlex.split(flag)]


def cxx_compiler() -> str:
    """Raises EnvironmentFault when there is none on the PATH."""
    name = os.environ.get("CXX", "c++")
    path = shutil.which(name)
    if path is None:
        raise EnvironmentFault(f"no C++ compiler: {name!r} is not on the PATH; install g++ or set CXX")
    return path


def cuda_root() -> Path:
    """The CUDA toolkit's own folder, asked of nvcc itself, since an nvcc on the PATH may be a wrapper script elsewhere.

    Raises:
        EnvironmentFault: no nvcc.
    """
    return _cuda_root(os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"), os.environ.get("PATH"))


@functools.lru_cache
def _cuda_root(home: str | None, path: str | None) -> Path:
    if home and (Path(home) / "bin" / "nvcc").exists():
        return Path(home)
    nvcc = shutil.which("nvcc", path=path)
    if nvcc is not None:
        try:
            done = subprocess.run([nvcc, "--dryrun", "-c", "x.cu"], capture_output=True, text=True, timeout=30)
            match = re.search(r"^#\$ TOP=(.+)$", done.stdout + done.stderr, re.MULTILINE)
            if match and (Path(match[1]) / "bin" / "nvcc").exists():
                return Path(match[1]).resolve()
        except (OSError, subprocess.SubprocessError):
            pass
        real = Path(nvcc).resolve().parent.parent
        if (real / "include" / "cuda_runtime.h").exists():
            return real
    for root in (Path("/usr/local/cuda"), Path("/opt/cuda")):
        if (root / "bin" / "nvcc").exists():
            return root.resolve()
    raise EnvironmentFault("no CUDA compiler: nvcc is not on the PATH; install the CUDA toolkit or set CUDA_HOME")


def version_of(compiler: str) -> str:
    """A compiler's own words about its version.

    Raises:
        EnvironmentFault: when it cannot be run.
    """
    return _version_of(compiler, os.environ.get("PATH"))


@functools.lru_cache
def _version_of(compiler: str, path: str | None) -> str:
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise EnvironmentFault(f"{compiler} cannot be run: {error}") from None
    return done.stdout.strip()


def _cxx_standard(torch: Path) -> str:
    """The C++ standard that this torch's own builder uses, read from its text: it differs between versions."""
    text = (torch / "utils" / "cpp_extension.py").read_text()
    match = re.search(r"'-fPIC', '-std=c\+\+(\d+)'", text) or re.search(r"-std=c\+\+(\d+)", text)
    return match[1] if match else "17"


def python_command() -> list[str]:
    """An interpreter that takes nothing from the caller's environment or folder."""
    return [sys.executable, "-I", "-B"]

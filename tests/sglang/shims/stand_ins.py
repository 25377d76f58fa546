"""Stand-ins for packages that SGLang imports everywhere and calls only on a GPU, for pictures or in a notebook.

`install()` makes `import triton` and its like (and any submodule of them) succeed. A text model with the pure-PyTorch
attention and sampling back ends calls nothing in them; a call raises instead of computing something wrong.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

PACKAGES = ("triton", "torchvision", "sgl_kernel", "IPython")
ABSENT = ("triton.knobs",)  # SGLang hooks into it where it exists
DECORATORS = ("jit", "autotune", "heuristics")


class Inert:
    """Base of the stand-in classes: SGLang makes instances of some (`triton.Config`) as it is imported."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class StandIn(types.ModuleType):
    """Has every attribute: an inert class for a capitalised name, a decorator, or else another stand-in."""

    __version__ = "3.0.0"  # SGLang compares triton's

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = _attribute(self.__name__, name)
        setattr(self, name, value)
        return value

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.__name__} has no CPU implementation: a stand-in was imported for it")


def _attribute(package: str, name: str) -> Any:
    if name in DECORATORS:
        return _decorator
    if name == "constexpr":
        return lambda value: value
    if name[0].isupper():
        return type(name, (Inert,), {"__module__": package})
    return importlib.import_module(f"{package}.{name}")


def _decorator(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Serves `@jit` and `@jit(...)`: kernels can be defined, and not launched."""
    return function if callable(function) else _decorator


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname.partition(".")[0] not in PACKAGES or fullname in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install() -> None:
    # These two look for triton and torchvision once, as they are imported, and must not find the stand-ins.
    import torch._dynamo  # noqa: F401
    import transformers.image_utils  # noqa: F401

    sys.meta_path.insert(0, Finder())

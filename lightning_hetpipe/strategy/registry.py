"""The names that ``Trainer(strategy=...)`` understands, registered without importing Lightning.

Lightning lives in two namespaces, ``lightning.pytorch`` and ``pytorch_lightning``, each with its own
registry. A namespace that is already imported gets the names at once, the other when it is imported.
What is registered is a factory; the strategy itself is imported when a Trainer asks for it.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")
START_METHODS = {
    "hetpipe": "popen",
    "hetpipe_spawn": "spawn",
    "hetpipe_fork": "fork",
    "hetpipe_notebook": "fork",
}


def register() -> None:
    """Makes the names known to every Lightning namespace, now or when it is imported."""
    waiting = []
    for namespace in NAMESPACES:
        strategies = sys.modules.get(f"{namespace}.strategies")
        if hasattr(strategies, "StrategyRegistry"):
            _add_names(strategies, namespace)
        else:
            waiting.append(namespace)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(waiting))


def _add_names(strategies: Any, namespace: str) -> None:
    for name, start_method in START_METHODS.items():
        strategies.StrategyRegistry.register(
            name,
            _Factory(namespace),
            description=f"Pipeline over unequal devices, processes started by {start_method!r}",
            override=True,
            start_method=start_method,
        )


class _Factory:
    """Makes the strategy of one namespace; imports it on first use."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def __call__(self, **options: Any) -> Any:
        from lightning_hetpipe.strategy.hetpipe import strategy_class

        return strategy_class(self._namespace)(**options)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees a namespace's ``strategies`` package being imported, and adds the names to it afterwards."""

    def __init__(self, namespaces: Sequence[str]) -> None:
        self._namespaces = {f"{namespace}.strategies": namespace for namespace in namespaces}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        namespace = self._namespaces.pop(fullname, None)
        if namespace is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, namespace)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: Any, namespace: str) -> None:
        self._inner = inner
        self._namespace = namespace

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _add_names(module, self._namespace)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_inner"], name)

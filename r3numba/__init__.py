"""Routed-expert replay for mixture-of-experts training: from captured routes to the training batch.

Importing this package imports neither NumPy, Numba nor torch; a name is loaded at its first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ._dispatch import backend_info as backend_info
    from ._warmup import warmup as warmup
    from .audit import CorruptRoutesError as CorruptRoutesError
    from .audit import RouteAudit as RouteAudit
    from .audit import RouteMismatch as RouteMismatch
    from .audit import audit_routes as audit_routes
    from .audit import compare_routes as compare_routes
    from .collate import RouteBatch as RouteBatch
    from .collate import collate_routes as collate_routes
    from .collator import RouteCollator as RouteCollator
    from .masks import router_padding_mask as router_padding_mask
    from .pack import PackedRoutes as PackedRoutes
    from .pack import pack_routes as pack_routes
    from .routes import compact_routes as compact_routes
    from .routes import dummy_routes as dummy_routes
    from .trace import RoutedExpertTrace as RoutedExpertTrace
    from .trace import TokenMetadataTrace as TokenMetadataTrace
    from .wire import DecodedRoutes as DecodedRoutes
    from .wire import decode_response as decode_response
    from .wire import decode_routes as decode_routes
    from .wire import encode_routes as encode_routes

_HOME = {
    "DecodedRoutes": "wire",
    "RoutedExpertTrace": "trace",
    "TokenMetadataTrace": "trace",
    "decode_response": "wire",
    "decode_routes": "wire",
    "encode_routes": "wire",
    "CorruptRoutesError": "audit",
    "RouteAudit": "audit",
    "RouteMismatch": "audit",
    "audit_routes": "audit",
    "compare_routes": "audit",
    "PackedRoutes": "pack",
    "RouteBatch": "collate",
    "RouteCollator": "collator",
    "backend_info": "_dispatch",
    "collate_routes": "collate",
    "compact_routes": "routes",
    "dummy_routes": "routes",
    "pack_routes": "pack",
    "router_padding_mask": "masks",
    "warmup": "_warmup",
}
_MODULES = ("client", "guards", "topology")

__all__ = ["__version__", *_HOME, *_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

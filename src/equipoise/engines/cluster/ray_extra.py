"""Ray is an extra of Equipoise, and is imported when a cluster is used."""

from __future__ import annotations

import os
import warnings
from typing import Any

from equipoise.errors import EquipoiseError


def require_ray() -> Any:
    """The module `ray`; says how to get it where it is not installed."""
    try:
        import ray
    except ImportError as failure:
        raise EquipoiseError(f'{failure}. Install Ray with Equipoise: pip install "equipoise[ray]"') from failure
    return ray


def connect(address: str) -> Any:
    """The module `ray`, connected to a cluster.

    "auto" is the cluster that this process is connected to, that RAY_ADDRESS names or that runs on this machine; without one
    Ray is started here and ends with this process. "local" always starts it here. Anything else is the address of a cluster.
    """
    ray = require_ray()
    if address.startswith("ray://"):
        raise EquipoiseError(
            f"{address!r} is the address of Ray Client, which every call and every tensor would pass through. Run this "
            'program on a node of the cluster, by `ray job submit` for example, with address="auto".'
        )
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("auto", "local", here):
            raise EquipoiseError(f"This process is connected to the Ray cluster at {here}, not {address}: use ray.shutdown().")
        return ray
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {"logging_level": "WARNING", "log_to_driver": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray's own, about its future versions
        try:
            if address == "auto":
                ray.init(**options, **({} if _has_cluster() else {"include_dashboard": False}))
            elif address == "local":
                ray.init(address="local", include_dashboard=False, **options)
            else:
                ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as failure:
            raise EquipoiseError(
                f"No Ray cluster answers at {address!r}: {failure}. Start one by `ray start --head`, give its address "
                '(HOST:PORT), or give address="local" for the cores of this machine.'
            ) from failure
    return ray


def _has_cluster() -> bool:
    """Whether a cluster is named or runs on this machine, which `ray.init()` would then connect to."""
    if os.environ.get("RAY_ADDRESS"):
        return True
    from ray._private.services import canonicalize_bootstrap_address

    return canonicalize_bootstrap_address(None) is not None  # type: ignore[arg-type]


def connection(ray: Any) -> tuple[str, str]:
    """What tells one connection of this process from another: the cluster's address and the name of the job there."""
    context = ray.get_runtime_context()
    return context.gcs_address, context.get_job_id()

"""Ray is an extra of Equipoise, and is imported when a cluster is used."""

from __future__ import annotations

import os
import warnings
from typing import Any

from equipoise.errors import EquipoiseError

INLINE_VARIABLE = "RAY_max_direct_call_object_size"
# Of a Ray that is started here: workers are not less than other programs, and models and sums up to a megabyte travel with
# calls as one object. Ray's own values are 15 and 102400. Who starts a cluster can set them there. The last one is how many
# seconds Ray's agents look for a head that is gone, before they end, too: it goes with this process. Ray's own value is 60.
OUR_OWN = {"RAY_worker_niceness": "0", INLINE_VARIABLE: "1200000", "RAY_gcs_rpc_server_reconnect_timeout_s": "5"}


def require_ray() -> Any:
    """The module `ray`; says how to get it where it is not installed."""
    try:
        import ray
    except ImportError as failure:
        raise EquipoiseError(f'{failure}. Install Ray with Equipoise: pip install "equipoise[ray]"') from failure
    return ray


def connect(address: str, **resources: Any) -> Any:
    """The module `ray`, connected to a cluster; one that is started here gets `resources`, e.g. num_cpus=2.

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
            if address == "local" or (address == "auto" and not _has_cluster()):
                for name, value in OUR_OWN.items():
                    os.environ.setdefault(name, value)
                ray.init(address="local", include_dashboard=False, **options, **resources)
            else:
                ray.init(address=None if address == "auto" else address, **options)
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

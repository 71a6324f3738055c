"""Why the server does not give what was asked for; each reason has the status of its answer."""

from __future__ import annotations

from equipoise.errors import EquipoiseError


class Gone(EquipoiseError):
    """What was asked for is not there (any more); `status` is the answer's."""

    status = 404


class Withheld(Gone):
    """What was asked for may not be shown."""

    status = 403


class Damaged(Gone):
    """A file that is not what its manifest says."""

    status = 409


class Busy(Gone):
    """More was asked at once than the server does."""

    status = 503

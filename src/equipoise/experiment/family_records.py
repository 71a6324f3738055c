"""Reads the records of a family's members from its folder, for reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.client_table import ClientTable
from equipoise.errors import ConfigError
from equipoise.experiment.family_files import CLIENTS, MANIFEST, MEMBERS, read_manifest
from equipoise.experiment.recorded import RecordedPart
from equipoise.report.knob import MemberClients, knob_data
from equipoise.run_record import RunRecord
from equipoise.runs.family import KNOBS, family_members


def family_knob(path: Path, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The numbers of the knob of a family's folder, given the records of its members; None for any other folder."""
    if not (path / MANIFEST).exists():
        return None
    manifest = read_manifest(path)
    pairs = zip(manifest.members, records, strict=True)
    members = [MemberClients(member.value, member.name, record.clients) for member, record in pairs]
    private = any(record.algorithm.privacy is not None for record in records)
    return knob_data(manifest.knob, members, manifest.judged_on, error_is_loss=manifest.error_is_loss, private=private)


def member_records(path: Path, whole: RunRecord, histories: dict[str, Any]) -> list[RunRecord]:
    """A record per member: the record of the whole folder with the member's name, risk, clients and history."""
    manifest = read_manifest(path)
    values = [member.value for member in manifest.members]
    if isinstance(whole.algorithm, Algorithm):
        base = whole.algorithm
        risk = base.risk if isinstance(base.risk, KNOBS[manifest.knob]) else Algorithm().risk
        algorithms: list[Any] = list(family_members(replace(base, risk=risk), {manifest.knob: values})[1].values())
    else:
        kind = KNOBS[manifest.knob].__name__
        recorded: Any = whole.algorithm
        algorithms = [replace(recorded, risk=RecordedPart(f"{kind}({manifest.knob}={value!r})")) for value in values]
    records = []
    for member, algorithm in zip(manifest.members, algorithms, strict=True):
        clients = ClientTable.from_parquet(path / MEMBERS / member.folder / CLIENTS)
        history = histories.get(member.name) or histories.get("")
        if history is None:
            raise ConfigError(f"{path} is damaged: its log says nothing of {member.name}.")
        seconds = whole.seconds / len(values)
        records.append(
            replace(
                whole,
                name=member.name,
                algorithm=algorithm,
                clients=clients,
                history=history,
                seconds=seconds,
                rounds=len(history.rounds),
            )
        )
    return records

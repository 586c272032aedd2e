"""Settings that change what stands on the wire: all processes must give the same."""

from __future__ import annotations

import pytest
from meeting import Meeting, config

from jax_hetccl import AgreementError


@pytest.mark.parametrize(
    ("setting", "left", "text"),
    [
        ("tls", True, "HETCCL_TLS is 1 in left/0 but 0 in right/0"),
        ("checksum", False, "HETCCL_CHECKSUM is 0 in left/0 but 1 in right/0"),
    ],
)
def test_all_processes_must_agree_on_it(setting: str, left: bool, text: str) -> None:
    with Meeting() as meeting:
        given = {"left/0": left, "left/1": left, "right/0": not left}
        joining = [
            meeting.start(name, {"agree": config(name, meeting.port, **{setting: value}).agree})
            for name, value in given.items()
        ]
        for future in joining:
            with pytest.raises(AgreementError, match=text):
                future.result(30)

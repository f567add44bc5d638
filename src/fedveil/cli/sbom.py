"""Bill of materials of the installed environment, in CycloneDX's JSON."""

from __future__ import annotations

import hashlib
import platform
import re
from importlib.metadata import Distribution, distributions
from typing import Any

from fedveil import __version__


def bill_of_materials() -> dict[str, Any]:
    """Return all installed distributions with versions, licences and digests of their lists of files (RECORD)."""
    parts = sorted((_component(one) for one in distributions() if one.metadata["Name"]), key=lambda part: str(part["bom-ref"]))
    unique = {part["bom-ref"]: part for part in parts}
    unique.pop(fedveil := f"pkg:pypi/fedveil@{__version__}", None)
    python = {"type": "platform", "bom-ref": "python", "name": "python", "version": platform.python_version()}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": fedveil,
                "name": "fedveil",
                "version": __version__,
                "purl": fedveil,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": [python, *unique.values()],
    }


def _component(installed: Distribution) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", installed.metadata["Name"]).lower()
    reference = f"pkg:pypi/{name}@{installed.version}"
    part: dict[str, Any] = {
        "type": "library",
        "bom-ref": reference,
        "name": name,
        "version": installed.version,
        "purl": reference,
    }
    fields = installed.metadata.json
    if licence := fields.get("license_expression"):
        part["licenses"] = [{"expression": licence}]
    elif (licence := str(fields.get("license", "")).strip()) and "\n" not in licence:
        part["licenses"] = [{"license": {"name": licence}}]
    if record := installed.read_text("RECORD"):
        digest = hashlib.sha256(record.encode()).hexdigest()
        part["properties"] = [{"name": "fedveil:record-sha256", "value": digest}]
    return part

"""Write the software bill of materials of this environment: CycloneDX 1.6 as JSON, from the metadata that pip wrote.

    podman run --rm hvdtrain python /opt/hvdtrain/containers/sbom.py > sbom.json

Owns the document; installs nothing. Python packages only: those of the base image are in its own bill. The standard
library only.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import re
import sys
import uuid
from typing import Any


def component(found: importlib.metadata.Distribution) -> dict[str, Any]:
    """Return one installed distribution as a component; with its license, and its digest where pip recorded one."""
    name, version = found.metadata["Name"], found.version
    reference = purl(name, version)
    made: dict[str, Any] = {"type": "library", "bom-ref": reference, "name": name, "version": version,
                            "purl": reference}
    license_id = found.metadata.get("License-Expression") or ""
    text = (found.metadata.get("License") or "").strip()
    if license_id:
        made["licenses"] = [{"expression": license_id}]
    elif text and len(text) <= 100:  # some packages hold the whole text there
        made["licenses"] = [{"license": {"name": text}}]
    archive = json.loads(found.read_text("direct_url.json") or "{}").get("archive_info", {})
    digest = (archive.get("hashes") or {}).get("sha256")
    if digest:
        made["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return made


def purl(name: str, version: str) -> str:
    """Return the package URL: names as PyPI normalizes them, "+" of a local version escaped."""
    return f"pkg:pypi/{re.sub(r'[-_.]+', '-', name).lower()}@{version.replace('+', '%2B')}"


def requirements(found: importlib.metadata.Distribution, known: dict[str, str]) -> list[str]:
    """Return the references of the installed packages that this one requires, extras left out."""
    names = [re.split(r"[\s;\[<>=!~(]", text, maxsplit=1)[0] for text in found.requires or () if "extra ==" not in text]
    keys = {re.sub(r"[-_.]+", "-", name).lower() for name in names}
    return sorted(known[key] for key in keys if key in known)


def bill(epoch_s: float) -> dict[str, Any]:
    """Return the document; equal environments and times give equal ones."""
    installed = {re.sub(r"[-_.]+", "-", one.metadata["Name"]).lower(): one for one in importlib.metadata.distributions()
                 if one.metadata["Name"]}
    parts = {key: component(one) for key, one in sorted(installed.items())}
    known = {key: part["bom-ref"] for key, part in parts.items()}
    body = {"components": list(parts.values()), "dependencies": [
        {"ref": known[key], "dependsOn": requirements(installed[key], known)} for key in parts]}
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    when = datetime.datetime.fromtimestamp(epoch_s, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "serialNumber": f"urn:uuid:{serial}", "version": 1,
            "metadata": {"timestamp": when, "component": {
                "type": "container", "name": os.environ.get("IMAGE", "hvdtrain"), "bom-ref": "image",
                "version": parts.get("hvdtrain", {}).get("version", "unknown")}}, **body}


if __name__ == "__main__":
    moment = float(os.environ.get("SOURCE_DATE_EPOCH") or datetime.datetime.now().timestamp())
    json.dump(bill(moment), sys.stdout, indent=1)
    print()

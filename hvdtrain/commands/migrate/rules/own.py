"""Names of hvdtrain in code that is put into a script: those that the script does not use for something else."""

from __future__ import annotations

import re

from hvdtrain.commands.migrate.scan import Scan

HOMES = {"Config": "hvdtrain", "Trainer": "hvdtrain", "Data": "hvdtrain.config", "Exchange": "hvdtrain.config",
         "Named": "hvdtrain.config", "Schedule": "hvdtrain.config"}


class Names:
    """``names["Trainer"]``: its local name. ``trainer``: one for a Trainer."""

    def __init__(self, scan: Scan) -> None:
        self.trainer = "trainer" if "trainer" not in scan.bound else "hvd_trainer"
        self._as = {name: name if name not in scan.bound else f"Hvd{name}" for name in HOMES}

    def __getitem__(self, name: str) -> str:
        return self._as[name]

    def imports(self, text: str) -> list[str]:
        """The import lines of what ``text`` calls."""
        called = [name for name, local in self._as.items() if re.search(rf"\b{local}\(", text)]
        lines = []
        for module in dict.fromkeys(HOMES.values()):
            said = [name if name == self._as[name] else f"{name} as {self._as[name]}" for name in called
                    if HOMES[name] == module]
            lines += [f"from {module} import {', '.join(said)}"] if said else []
        return lines

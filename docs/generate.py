"""Writes docs/config.md from the dataclasses in hvdtrain/config/keys.py, and docs/records.md from
hvdtrain/core/records/__init__.py: ``python docs/generate.py``.

Owns the pages' layout and examples; names, types, units, defaults and meanings are read from the code.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any directory

from hvdtrain.config import schema, yaml_file as recipe  # noqa: E402
from hvdtrain.config import Config  # noqa: E402
from hvdtrain.core.records import EVENTS, VERSION  # noqa: E402

PAGE, RECORDS = (Path(__file__).with_name(name) for name in ("config.md", "records.md"))

EXAMPLE = """\
# recipe.yaml: PyTorch's SGD with momentum on digits, warmed up, saved every 100 steps
model: torch_models.cnn:build
model_args:
  norm: none
data: digits
epochs: 20
global_batch: 96
lr: 0.05
optimizer:
  name: SGD
  args: {momentum: 0.9, nesterov: true}
schedule:
  name: CosineAnnealingLR
  args: {T_max: 300}
  warmup_steps: 30
clip_norm: 1.0
checkpoint:
  every_steps: 100
  keep: 2
"""

INTRO = """\
<!-- Made by docs/generate.py from hvdtrain/config/keys.py; change it there. -->
# Configuration

A run is described by the keys below. Each has a default, so an empty configuration trains the built-in recipe.
A key is set in three places; where it is set in more than one, the later of this list counts:

1. a YAML file: `--config recipe.yaml`. Several files are laid over each other key by key, the last on top.
2. the environment: `HVDTRAIN_` and the key in capitals, two underscores for a dot: `HVDTRAIN_OPTIMIZER__NAME=SGD`;
   `HVDTRAIN_CONFIG` names a file.
3. the command line: `--optimizer.name SGD`.

The sections `data`, `optimizer`, `schedule` and `loss` take a bare text for their name, in all three places:
`--optimizer SGD`, `HVDTRAIN_DATA=mydata.py:load`, `data: digits` in a file. If an earlier place named something else,
its `args` are dropped with it, since they belong to the other name; the section's other keys stay. `--optimizer.name`
changes the name alone.

The order of the arguments on the command line does not matter. `--print_config` prints the outcome as YAML, which is a
valid file again. In Python the same keys are the fields of `hvdtrain.Config`, a section's name bare here too:
`Config(optimizer="SGD", lr=0.1)`. Every rank must see the same configuration; a run whose ranks differ does not start.

A changed key that does nothing as the run is set up, such as `schedule.args` without a `schedule.name`, is named in a
note when the run starts.

The keys `model_args` and those that end in `args` hold free-form keyword arguments. Setting such a key replaces it
whole; `--model_args.norm none` sets one entry and leaves the others.

## Example

```yaml
{example}```

```
horovodrun -np 4 python -m hvdtrain train --config recipe.yaml
HVDTRAIN_SEED=1 horovodrun -np 4 python -m hvdtrain train --config recipe.yaml --lr 0.1 --optimizer.args.momentum 0.8
```

## What is refused

Unknown keys, options and `HVDTRAIN_` variables (the answer names the nearest known one), values of another type, NaN
and infinity, a key given twice in one mapping, YAML tags, and files over {kib} KiB or of more than {values} values.
All of these end every rank with one line and exit status 2 before anything is started. A file is data: nothing in it
is run but the callables that `model`, `data.name` and `metrics` name.

## Keys
"""

SECTIONS = """
### `{name}`: {doc}

"""
HEAD = "| key | type | default | unit | meaning |\n|---|---|---|---|---|\n"


RECORDS_INTRO = """\
<!-- Made by docs/generate.py from hvdtrain/core/records/__init__.py; change it there. -->
# Records

What happens in a run is told as records. Each has an `event`, the `step` (how many have ended), the `time` (unix
seconds) and the values below. Rank 0 appends all of them to `log.jsonl` in the run's folder, one JSON object a line,
a "step" every `log_every` steps; the progress on the screen, trackers and the report page read the same records.

```
{{"event": "step", "time": 1789999999.123, "step": 100, "epoch": 1, "samples": 3200, "loss": 0.251, "lr": 0.1, ...}}
```

- The format has a version, {version}, in every "start" record as `schema`; a log whose "start" has none is version 1,
  which had fewer events and values. A later version only adds events and values, or counts one up. Read what you
  know, and leave the rest.
- A run that is resumed goes on with the same file: every "start" begins a fit, and steps may come twice after a
  failure. A crash may tear the last line; the next record begins on a line of its own.
- NaN and infinities are `null`. "by rank" is a list with an entry for each rank, in their order.
- A callback of yours adds records with `run.record("name", key=value)`, on rank 0; anything that JSON can hold. What
  the ranks know apart it gathers first.
- A record that cannot be written (a full disk) waits, 1,000 at most, and never ends a run.

"""


def records() -> str:
    """The whole text of docs/records.md."""
    text = RECORDS_INTRO.format(version=VERSION)
    for name, event in EVENTS.items():
        text += f"## {name}\n{event.doc}" + (f" How often: {event.often}." if event.often else "") + "\n\n"
        if event.values:
            rows = (f"| `{key}` | {doc.replace('|', chr(92) + '|')} |\n" for key, doc in event.values.items())
            text += "| value | meaning |\n|---|---|\n" + "".join(rows) + "\n"
    return text.rstrip() + "\n"


def page() -> str:
    """The whole text of docs/config.md."""
    every = schema.keys(Config)
    text = INTRO.format(example=EXAMPLE, kib=recipe.MAX_BYTES // 1024, values=f"{recipe.MAX_VALUES:,}")
    text += "\n" + HEAD + "".join(row(k) for k in every if "." not in k.name)
    own = {f.name: f.metadata.get("doc") for f in dataclasses.fields(Config)}
    for name, cls in schema.sections(Config).items():
        doc = own[name] or (cls.__doc__ or "").strip().rstrip(".")
        text += SECTIONS.format(name=name, doc=doc if own[name] else doc[:1].lower() + doc[1:])
        text += HEAD + "".join(row(k) for k in every if k.name.startswith(f"{name}."))
    return text


def row(key: schema.Key) -> str:
    """One key as a line of a table."""
    default = recipe.dump({"": key.default}).partition(":")[2].strip()
    if isinstance(key.default, (list, dict)):
        default = str(key.default).replace("'", "")
    words = re.sub(r" such as (\[.*?\]|\{.*?\})", "", schema.in_words(key.hint))
    cells = [f"`{key.name}`", words, f"`{default}`" if default not in ("", "''") else "empty", key.unit, key.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    RECORDS.write_text(records(), encoding="utf-8")

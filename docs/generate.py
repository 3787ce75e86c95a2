"""Writes docs/reference/settings.md from the dataclasses in hvdtrain/config/keys.py, and docs/reference/records.md from
hvdtrain/core/records/__init__.py: ``python docs/generate.py``.

Owns the pages' layout and examples; names, types, units, defaults and meanings are read from the code.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that the script runs from any directory

from hvdtrain.config import (  # noqa: E402
    Config,  # noqa: E402
    schema,
)
from hvdtrain.config import yaml_file as recipe
from hvdtrain.core.records import EVENTS, VERSION  # noqa: E402

DOCS = Path(__file__).resolve().parent
TREE = DOCS.parent
PAGE, RECORDS = (DOCS / "reference" / name for name in ("settings.md", "records.md"))
LINKS = DOCS / "external-links.txt"

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

A run is described by the keys below; an empty configuration trains the built-in recipe.
Where a key is set in several places, the later of this list counts:

1. a YAML file: `--config recipe.yaml`; of several files the last counts, key by key.
2. the environment: `HVDTRAIN_` and the key in capitals, two underscores for a dot: `HVDTRAIN_OPTIMIZER__NAME=SGD`;
   `HVDTRAIN_CONFIG` names a file.
3. the command line: `--optimizer.name SGD`.

The sections `data`, `optimizer`, `schedule` and `loss` take a bare text for their name, in all three places:
`--optimizer SGD`, `HVDTRAIN_DATA=mydata.py:load`, `data: digits` in a file. If an earlier place named something else,
its `args` are dropped; the section's other keys stay. `--optimizer.name` changes the name alone.

`--print_config` prints the outcome as YAML, which is a valid file again. In Python the keys are the fields of
`hvdtrain.Config`: `Config(optimizer="SGD", lr=0.1)`. A run whose ranks' configurations differ does not start.

Names of other trainers work at the top level, in all places: `global_batch_size: 64`, `--learning_rate 0.1`,
`Config(bucket_cap_mb=25)`. The tables list them after "also"; all output shows the key. An alias together with its key
in one file, environment or command line is an error.
`zero_stage: N` sets `data_parallel.name` to `zero` and `.stage` to N; 0 means `replicate`. Names of another meaning or
unit, such as `eval_steps`, are refused with the key to look at.

`off`, `none`, `null`, `false`, `0` and empty turn off every key that can be off: `balance: none`, `compression: off`,
`--clip_norm off`, `trackers: null`. The sections `schedule`, `early_stop`, `trace`, `pipeline` and `data_parallel` take
them bare: `schedule: off`, which ends its warm-up, too; `schedule: none` names no schedule and keeps the warm-up.
`collectives: off` exchanges no gradients. A text `0` of `remat` is the block of that name; the number 0 in a file is
off. A list takes a bare item, or several with commas: `trackers: wandb`, `--trackers wandb,csv`.

A run of your own model or data that leaves optimizer, `lr` or `epochs` unset prints one line:
`assumed: Adam, lr 0.002, 12 epochs; set lr, epochs, optimizer`. The built-in recipe is `hvdtrain:digits`.

A changed key without effect, such as `schedule.args` without a `schedule.name`, is named in a note at the start.

`module:callable` may be `path/file.py:callable`. Setting `model_args`, or a key that ends in `args`, replaces it whole;
`--model_args.norm none` sets one entry.

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
All of these end every rank with one line and exit status 2 before anything is started. Of a file only the callables
that `model`, `data.name` and `metrics` name are run.

## Keys
"""

SECTIONS = """
### `{name}`: {doc}

"""
HEAD = "| key | type | default | unit | meaning |\n|---|---|---|---|---|\n"


RECORDS_INTRO = """\
<!-- Made by docs/generate.py from hvdtrain/core/records/__init__.py; change it there. -->
# Records

Rank 0 appends the records of a run to `log.jsonl` in the run's folder, one JSON object a line. Each has an `event`, the
`step` (how many have ended), the `time` (unix seconds) and the values below.

```
{{"event": "step", "time": 1789999999.123, "step": 100, "epoch": 1, "samples": 3200, "loss": 0.251, "lr": 0.1, ...}}
```

- Every "start" record has the format's version, {version}, as `schema`; logs without it are version 1. Ignore events
  and values that you do not know: later versions add some.
- A resumed run appends to the same file: every "start" begins a fit, and steps may come twice after a
  failure. A crash may truncate the last line.
- `null` is an unknown value, NaN or infinity. Names that end in `_s`, except `samples_per_s`, are seconds. "by rank" is
  a list in the order of the ranks.
- A callback adds records of JSON values with `run.record("name", key=value)`, on rank 0.
- A record that cannot be written (a full disk) waits, 1,000 at most, and never ends a run.

"""


def records() -> str:
    """Return docs/reference/records.md."""
    text = RECORDS_INTRO.format(version=VERSION)
    for name, event in EVENTS.items():
        text += f"## {name}\n{event.doc}" + (f" Written {event.often}." if event.often else "") + "\n\n"
        if event.values:
            text += "".join(f"- `{key}`: {doc}\n" for key, doc in event.values.items() if doc)
            bare = ", ".join(f"`{key}`" for key, doc in event.values.items() if not doc)
            text += (f"- {bare}\n" if bare else "") + "\n"
    return text.rstrip() + "\n"


def page() -> str:
    """Return docs/reference/settings.md."""
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
    words = re.sub(r"\b(an?|one of) | such as (\[.*?\]|\{.*?\})", "", schema.in_words(key.hint))
    also = f"; also {', '.join(f'`{alias}`' for alias in key.aliases)}" if key.aliases else ""
    shown = f"`{default}`" if default not in ("", "''") else "empty"
    cells = [f"`{key.name}`", words, shown, key.unit, key.help + also]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def external_links() -> str:
    """Return the links of README.md, docs/ and the like to other sites, one a line."""
    pages = [page for page in (*TREE.glob("*.md"), *DOCS.rglob("*.md")) if page.name != "CHANGELOG.md"]
    link = re.compile(r"(?:\]\(|<)(https?://[^)>\s]+)[)>]")
    found = {target for page in pages for target in link.findall(page.read_text("utf-8"))}
    return "\n".join(sorted(found)) + "\n"


if __name__ == "__main__":
    LINKS.write_text(external_links(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    RECORDS.write_text(records(), encoding="utf-8")

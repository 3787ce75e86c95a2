"""The tables of docs/tutorials/planning.md are what their commands print."""

import json
from pathlib import Path

import pytest

from hvdtrain.commands.plan import cli
from hvdtrain.core import ROOT
from hvdtrain.core.units import format_bytes

PAGE = ROOT.parent / "docs" / "tutorials" / "planning.md"
FILES = PAGE.with_suffix("")
RESNET50 = "--model resnet50 --precision bf16 --samples 1281167"
RESNET18 = "--model resnet18 --samples 10000000"
LLAMA = "--model llama-7b --precision bf16 --global_batch 8"


@pytest.fixture
def page(monkeypatch):
    monkeypatch.chdir(FILES)
    return PAGE.read_text(encoding="utf-8")


def planned(capsys, inventory, assume, options):
    words = ["--inventory", f"{inventory}.yaml", "--assume", f"{assume}.yaml", "--json", "-", *options.split()]
    assert cli.main(words) == 0
    return json.loads(capsys.readouterr().out)


def off(predicted, published):
    return f"{100 * (predicted / published - 1):+.1f} %"


def test_every_file_is_used_or_an_example(page):
    used = page + Path(__file__).read_text(encoding="utf-8")
    assert not [path.stem for path in FILES.glob("*") if f"/{path.name}" not in used and f'"{path.stem}"' not in used]
    assert all(f"`{options}`" in page for options in (RESNET50, RESNET18, LLAMA))


def test_mixed_gpus(page, capsys):
    for name, files, batch, more, published in (
            ("1 x A100", "a100-1", 128, "", 1200), ("4 x A100", "a100-4", 512, "", 4500),
            ("2 x A100 + 2 x 3090", "mixed-4", 512, "", 3800),
            ("the same, balanced", "mixed-4", 512, " --balance static", 4200)):
        assumed = ("resnet50", "resnet50-3090") if "3090" in name or more else ("resnet50",)
        rates = [planned(capsys, files, assume, f"{RESNET50} --global_batch {batch}{more}")["samples_per_s"]
                 for assume in assumed] * (3 - len(assumed))
        cells = " | ".join(f"{rate:.0f} | {off(rate, published)}" for rate in rates)
        assert f"| {name} | {published} | {cells} |" in page


def test_cifar100(page, capsys):
    alone = None
    for name, files, gpus, published in (("1", "gpus-1", 1, 58), ("8", "gpus-8", 8, 12),
                                         ("32, 25 Gbit/s", "gpus-32", 32, 2.4),
                                         ("32, 100 Gbit/s", "gpus-32-fast", 32, 2.4)):
        found = planned(capsys, files, "cifar100", f"{RESNET18} --global_batch {128 * gpus}")
        minutes, step = 60 * found["hours"], found["step_s"]["mid"]
        alone = alone or minutes
        cells = (f"{minutes:.1f} | {off(minutes, published)} | {58 / published:.1f}x | {alone / minutes:.1f}x | "
                 f"{100 * found['step_parts_s']['exchange'] / step:.0f} %")
        assert f"| {name} | {published} | {cells} |" in page
    whole = planned(capsys, "gpus-8", "cifar100", f"{RESNET18} --global_batch 1024")
    zero, = (one for one in whole["alternatives"] if one["name"] == "ZeRO stage 2")
    saved = 1 - zero["memory"]["need_bytes"] / whole["memory"]["need_bytes"]
    assert f"predicted to save {100 * saved:.0f} % of a GPU's" in page


def test_llama(page, capsys):
    found = planned(capsys, "a100-80-4", "llama-7b", f"{LLAMA} --samples 500000")
    zero, = (one for one in found["alternatives"] if one["name"] == "ZeRO stage 2")
    for name, plan in (("as given", found), ("ZeRO stage 2", zero)):
        hours, fits = plan["hours"], "yes" if plan["fits"] else "no"
        assert f"| {name} | {fits} | {hours:.1f} | {off(hours, 20)} | {plan['cost']:.0f} |" in page


def test_which_card(page, capsys):
    for name, model, batch in (("ResNet-152, 32", "resnet152", 32), ("BERT-large, 512 tokens, 8", "bert-large", 8),
                               ("ViT-L, 32", "vit-large", 32), ("LLaMA-7B, 1", "llama-7b", 1)):
        found = planned(capsys, "card-1", model, f"--model {model} --precision auto --samples 1000 "
                        f"--global_batch {batch}")
        fits = {one["device"]: one["fits"] for one in found["alternatives"] if one["device"]}
        fits["A100-80GB"] = found["fits"]
        small = [device for device, fit in fits.items() if not fit]
        told = "none" if not small else f"all but {', '.join(sorted(set(fits) - set(small)))}"
        assert f"| {name} | {format_bytes(found['memory']['need_bytes'])} | {told} |" in page

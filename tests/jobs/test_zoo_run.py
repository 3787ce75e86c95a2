"""Commands of docs/how-to/models.md under mpirun without a network. Results over ranks: tests/conformance."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import zoo
from runner import mpirun

ALONE = {"HF_HUB_OFFLINE": "1", "http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    zoo.prepared(monkeypatch, tmp_path)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    x, y = zoo.texts()
    np.savez("texts.npz", x=x, y=y, x_test=x, y_test=y)


def trained(ranks, *options):
    options = [*options, "--data", "texts.npz", "--max_steps", "2", "--global_batch", "8", "--progress", "off"]
    job = mpirun(ranks, ["-m", "hvdtrain", "train", *options], 100, ALONE)
    assert job.returncode == 0 and "test accuracy" in job.text and f"{ranks} on 1 host" in job.text, job.text


def test_transformers(tmp_path):
    for package in ("torch", "transformers"):
        zoo.wanted(package)
    folder = zoo.folder_of("bert", tmp_path)
    trained(2, "--model", "hf_classifier.py:build", "--model_args.folder", folder, "--remat", "every:2")


def test_keras_hub():
    for package in ("tensorflow", "keras_hub"):  # this process itself needs neither
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed (make setup, requirements/zoo.txt)")
    args = [word for name, value in zoo.BERT.items() for word in (f"--model_args.{name}", str(value))]
    trained(1, "--model", "hub_model.py:build", *args)

"""An evaluation without a fit: metrics, and no file anywhere."""

from small_runs import config, make_model, samples, solo

from hvdtrain.engine import loop


def test_an_evaluation_without_a_fit_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = solo(config(), make_model("numpy"), (samples(8), samples(6, seed=1)))
    loop.evaluate(run)
    metrics = run.state.metrics
    assert metrics["loss"] > 0 and 0 <= metrics["accuracy"] <= 1
    assert not list(tmp_path.iterdir())

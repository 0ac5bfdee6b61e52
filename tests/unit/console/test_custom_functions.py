"""Functions of the algorithm that a run names by import path are looked for before it starts."""

from __future__ import annotations

import pytest

from services.common.run_spec import RunSpec
from services.common.settings import SettingsError
from services.console.core.check_code import check_code

ROLLOUT = {"hf_checkpoint": "model", "num_rollout": 3, "rollout_batch_size": 4, "n_samples_per_prompt": 2}
KEYS = ("custom_loss_function_path", "custom_advantage_function_path", "custom_tis_function_path")


@pytest.mark.parametrize("key", KEYS)
def test_a_function_of_the_algorithm_must_exist(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('must not be imported')\ndef score(x): return 1.0\n")
    check_code(RunSpec.model_validate({"rollout": ROLLOUT, "trainer": {key: "mine.score"}}))
    with pytest.raises(SettingsError, match=f"{key} 'mine.scor': .*did you mean 'score'?"):
        check_code(RunSpec.model_validate({"rollout": ROLLOUT, "trainer": {key: "mine.scor"}}))

"""What the benchmarks start is what train.py takes, and what they compare is what was logged."""

from benchmarks import claims, speed
from config import parse


def test_every_claim_is_a_run():
    """Rows differ from each other, and train.py takes their options."""
    configs = [parse([*line], "")[0] for rows in claims.settings().values() for line in rows.values()]
    assert len(configs) == len({repr(config) for config in configs}) == 20


def test_a_run_is_measured_by_its_last_evaluation():
    spreads = [
        {"kind": "iteration", "reward_spread": spread} for spread in [2.0] * 10 + [9.0] * 5 + [3.0] * 10
    ]
    paired = {"reward": {"mean": 0.5}, "verifier": {"mean": 0.1}}
    first = {"kind": "evaluation", "paired": {name: {"mean": 0.0} for name in paired}}
    last = {"kind": "evaluation", "paired": paired}
    expected = {"reward": 0.5, "verifier": 0.1, "exact": 0.5, "spread": 0.5}
    assert claims.measure([first, *spreads, last]) == expected
    paired["exact"] = {"mean": -1.0}
    assert claims.measure([first, *spreads, last]) == expected | {"exact": -1.0}


def test_speeds_of_the_tiny_model(world):
    """The full size takes the same path on a GPU."""
    tiny = dict(speed.load_pipeline("tiny/hunyuan").transformer.config)
    rows = [speed.passes(world, 1, "tiny", tiny, (3, 8, 8), 10), *speed.lora_update(world, 1, "tiny")]
    assert len(rows) == 2 and all(side > 0 for row in rows for side in (row.a, row.b))

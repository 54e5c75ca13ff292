"""Benchmarks of HPKV, each against a floor that is measured right before and after it in the same run.

    python -m benchmarks.all                       # everything, then the plot
    python -m benchmarks.mover --json mover.json   # one of: mover transfer control start engine peers

``docs/benchmarks.md`` says what is compared with what, and why it is fair.
"""

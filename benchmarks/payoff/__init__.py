"""Predicted against realised savings: loops with one planted fault each, and the same loops fixed.

    python -m benchmarks.payoff                            all pairs on the GPU, then the verdict
    python -m benchmarks.payoff --only tf32 host_sync      these pairs
    python -m benchmarks.payoff --no-judge --traces F      measure and record, but do not analyse
    python -m benchmarks.payoff --judge-only --traces F    the verdict on what F holds; needs no GPU

A case is a function that builds its loop with the fault or without; cases lie in `benchmarks/payoff/cases`,
a file a family, and register themselves. Each is measured in a process of its own: three interleaved rounds
of `Trainer.fit` with and without the fault, then one under `TrainingAdvisor`, whose trace is analysed with
the measured step time as its baseline. The folder of traces (`--traces`) holds `NAME.json.gz` and
`payoff.json`; an interrupted run goes on where it stopped.
"""

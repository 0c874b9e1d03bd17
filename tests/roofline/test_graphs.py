"""Kernels of graphs take their work from the same kernels outside a graph, or stay unknown."""

import numpy as np
import pytest

from advisor.report.build import analyze, build_report
from advisor.roofline.analysis import analyse_timeline
from advisor.roofline.graphs import Match, find_replays
from advisor.trace.events import KERNEL
from advisor.trace.link import join, load
from advisor.trace.phases import PHASES
from tests.trace.builder import Builder

ADD, GEMM, NORM, MUL = "void vectorized_elementwise_kernel<add>", "sm90_gemm_128x128", "layer_norm", "mul"
GRID = {"grid": [64, 1, 1], "block": [128, 1, 1]}


def matched(sequence, examples, work, needs_order=()):
    """Places of examples, over letters; letters in `needs_order` need their neighbours."""
    letters = sorted(set(sequence + examples))
    number = {letter: i for i, letter in enumerate(letters)}
    weak = np.array([letter in needs_order for letter in letters])
    ids = [np.array([number[x] if x != "." else -1 for x in text], np.int64) for text in (sequence, examples)]
    return Match(*ids).same(np.array([ord(x) for x in work]), weak).tolist()


def test_a_kernel_that_always_did_the_same_needs_no_order():
    assert matched("BA", "AxB", "111") == [2, 0]


def test_a_kernel_seen_nowhere_else_stays_unknown():
    assert matched("AZ", "AB", "12") == [0, -1]


def test_equal_kernels_of_different_work_are_told_by_their_neighbours():
    # GIVEN a kernel G that did work 1 between q and a, and work 2 between u and a
    found = matched("qGauGa", "qGauGa", "010020")
    # THEN each place takes its own
    assert found[1] == 1
    assert found[4] == 4


def test_neighbours_further_out_are_asked_until_those_left_agree():
    # GIVEN G between the same neighbours, twice, and only the second next differ
    assert matched("xaGby", "xaGby.zaGbw", "00100000200")[2] == 2
    assert matched("zaGbw", "xaGby.zaGbw", "00100000200")[2] == 8


def test_contradicting_surroundings_tell_nothing():
    # GIVEN one example with the longer run before, and another with the longer run after
    assert matched("yxaGbcd", "yxaGb.aGbcd", "00010000200")[3] == -1


def test_what_order_cannot_tell_stays_unknown():
    # GIVEN two eager steps of the same kernels with different work
    assert matched("aGb", "aGb.aGb", "0100020") == [0, -1, 2]


def test_a_single_kernel_of_different_work_stays_unknown():
    assert matched("G", "aGb.aGb", "0100020") == [-1]


def test_a_matrix_product_among_strangers_stays_unknown_even_if_seen_once():
    assert matched("cGd", "aGb", "010", needs_order="G")[1] == -1
    assert matched("aGb", "aGb", "010", needs_order="G")[1] == 1
    # Its inner neighbour suffices where the graph begins with it.
    assert matched("Gb", "aGb", "010", needs_order="G")[0] == 1


def test_layers_alike_are_told_apart_by_the_whole_sequence():
    # GIVEN three layers of the same kernels, each of a module of its own
    assert matched("sababab!", "sababab!.sababab!", "01122330.01122330") == [0, 1, 2, 3, 4, 5, 6, 7]


def test_a_gap_between_examples_is_no_neighbour():
    assert matched("aGb", "aG.b", "0100", needs_order="G")[1] == -1


def gemm(trace, at, m, n, k, kernel=GEMM):
    """A matrix product launched by its operator."""
    trace.op("aten::mm", at, 5, dims=[[m, k], [k, n]]).launch(kernel, at + 1, at=at + 2, dur=2, **GRID)


def eager_step(trace, at):
    """add, product with k=64, norm, product with k=256, mul."""
    trace.op("aten::add", at, 5, dims=[[512, 16], [512, 16], []]).launch(
        ADD, at + 1, at=at + 2, dur=2, **GRID
    )
    gemm(trace, at + 10, 128, 128, 64)
    trace.op("aten::mul", at + 20, 5, dims=[[64, 64], [64, 64]]).launch(
        MUL, at + 21, at=at + 22, dur=2, **GRID
    )
    gemm(trace, at + 30, 128, 128, 256)
    trace.op("aten::mul", at + 40, 5, dims=[[64, 64], [64, 64]]).launch(
        MUL, at + 41, at=at + 42, dur=2, **GRID
    )


def replayed_step(trace, at, correlation, kernels=(ADD, GEMM, MUL, GEMM, MUL), **shape):
    trace.call(at, correlation=correlation, name="cudaGraphLaunch")
    for i, kernel in enumerate(kernels):
        trace.work(kernel, at + 10 + 10 * i, 8, correlation=correlation, **{**GRID, **shape})


def figures(analysis, mask):
    return list(
        zip(analysis.costs.flops[mask].tolist(), analysis.costs.bytes_read[mask].tolist(), strict=True)
    )


def test_a_replayed_step_costs_what_the_eager_one_did():
    # GIVEN an eager step and its replay in one trace
    trace = Builder().step(1, 0, 100)
    eager_step(trace, 0)
    trace.step(2, 100, 100)
    replayed_step(trace, 100, 999)
    trace.step(3, 200, 100)
    # WHEN
    analysis = analyse_timeline(trace.join())
    # THEN both products have their own inner size, though name and grid are the same
    assert analysis.inferred.tolist() == [False] * 5 + [True] * 5
    assert figures(analysis, analysis.inferred) == figures(analysis, ~analysis.replayed)
    gemms = [flops for flops, _ in figures(analysis, analysis.inferred)][1:4:2]
    assert gemms == [2 * 128 * 128 * 64, 2 * 128 * 128 * 256]


def test_operators_are_carried_over_and_not_counted_as_joined():
    trace = Builder().step(1, 0, 100)
    eager_step(trace, 0)
    trace.step(2, 100, 100)
    replayed_step(trace, 100, 999)
    analysis = analyse_timeline(trace.join())
    rows = analysis.timeline.launches
    ops = [analysis.timeline.op_name(int(op)) for op in rows.op[analysis.replayed]]
    assert ops == ["aten::add", "aten::mm", "aten::mul", "aten::mm", "aten::mul"]
    coverage = build_report(analysis).summary.coverage
    assert coverage.attributed_time_fraction == pytest.approx(10 / 50)
    assert coverage.replayed_time_fraction == coverage.inferred_time_fraction == pytest.approx(40 / 50)


def test_a_replay_takes_the_example_s_phase_whatever_part_of_the_loop_launched_it():
    # GIVEN an eager step whose ranges are marked, and one graph of it launched in a forward range
    trace = Builder().step(1, 0, 100).range("advisor::phase::forward", 0, 30)
    trace.range("advisor::phase::optimizer", 30, 40)
    eager_step(trace, 0)
    trace.step(2, 100, 100).range("advisor::phase::forward", 95, 90)
    replayed_step(trace, 100, 999)
    analysis = analyse_timeline(trace.join())
    phases = [PHASES[phase] for phase in analysis.timeline.launches.phase[analysis.replayed]]
    assert phases == ["forward"] * 3 + ["optimizer"] * 2


def test_an_operator_around_a_graph_s_launch_does_not_claim_what_is_in_it():
    trace = Builder().step(1, 0, 100).op("aten::mm", 0, 50, dims=[[512, 512], [512, 512]])
    replayed_step(trace, 10, 999)
    analysis = analyse_timeline(trace.join())
    assert np.isnan(analysis.costs.flops).all()


def test_another_grid_is_another_kernel():
    trace = Builder().step(1, 0, 100)
    eager_step(trace, 0)
    trace.step(2, 100, 100)
    replayed_step(trace, 100, 999, grid=[65, 1, 1])
    analysis = analyse_timeline(trace.join())
    assert not analysis.inferred.any()
    assert np.isnan(analysis.costs.flops[analysis.replayed]).all()


def test_a_reference_trace_tells_what_the_trace_itself_does_not(tmp_path):
    # GIVEN a trace of replays only, and an eager one
    eager, graphed = Builder().step(1, 0, 100), Builder().step(1, 0, 100)
    eager_step(eager, 0)
    replayed_step(graphed, 0, 999)
    for name, trace in (("eager", eager), ("graphed", graphed)):
        (tmp_path / f"{name}.json").write_bytes(trace.json())
    # WHEN
    alone = analyze(tmp_path / "graphed.json")
    told = analyze(tmp_path / "graphed.json", reference=tmp_path / "eager.json")
    # THEN
    assert alone.summary.coverage.costed_time_fraction == 0
    assert told.summary.coverage.costed_time_fraction == 1
    assert told.summary.flops_per_step == pytest.approx(2 * 128 * 128 * (64 + 256), rel=0.01)
    by_code = {remark.code: remark.message for remark in alone.data_quality}
    assert (
        "0% the work is that of the same kernels outside a graph; 100% stays unknown"
        in by_code["join.graphs"]
    )
    assert "--reference" in by_code["join.graphs"]
    assert "--reference" not in {r.code: r.message for r in told.data_quality}["join.graphs"]


def test_a_graph_of_one_kernel_is_known_by_its_launch():
    trace = Builder().call(0, correlation=1, name="hipGraphLaunch").work(GEMM, 10, 5, correlation=1, **GRID)
    assert find_replays(trace.join()).tolist() == [0]


def test_kernels_launched_one_by_one_are_no_replays():
    trace = Builder()
    eager_step(trace, 0)
    timeline = trace.join()
    assert (find_replays(timeline) == -1).all()
    assert analyse_timeline(timeline).replays is None


@pytest.mark.parametrize("name", ["mi300x_hipgraph_decode", "a100_tensorlist_cudagraph"])
def test_graphs_whose_kernels_run_nowhere_else_stay_unknown(shared, name):
    # GIVEN a trace in which no replayed kernel was launched outside a graph with the same grid
    analysis = analyse_timeline(load(shared / f"traces/public/{name}.json.gz"))
    assert analysis.replayed.sum() > 100
    assert not analysis.inferred.any()
    assert (build_report(analysis).summary.coverage.replayed_time_fraction or 0) > 0.2


@pytest.mark.parametrize(
    "name", ["gpt_naive_bf16", "llama_eager_bf16", "resnet50_amp16", "gpt_compiled_bf16"]
)
def test_a_step_made_to_look_replayed_gets_its_own_costs_back(shared, name):
    # GIVEN a real trace, the kernels of one steady step all put under a single launch
    plain = analyse_timeline(load(shared / f"traces/h200/{name}.json.gz"))
    trace, rows = plain.timeline.trace, plain.timeline.launches
    step = rows.step == np.flatnonzero(plain.timeline.steady)[-1]
    chosen = np.flatnonzero(step & (rows.kind == KERNEL))
    trace.device.correlation[chosen] = trace.device.correlation[chosen[np.argmin(rows.launch_ts_ns[chosen])]]
    # WHEN
    made = analyse_timeline(join(trace))
    # THEN what is told is right, and nearly all of it is told
    assert made.replayed.sum() == len(chosen)
    told = made.inferred
    wrong = (made.costs.flops != plain.costs.flops) | (made.costs.bytes_read != plain.costs.bytes_read)
    time = made.timeline.launches.dur_ns
    assert time[told & wrong].sum() <= 0.001 * time[chosen].sum()
    assert time[told].sum() >= 0.95 * time[chosen[plain.costs.known[chosen]]].sum()

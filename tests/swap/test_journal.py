"""Changes are undone in reverse, once, in part, for a while, and whatever happens."""

import pytest

from advisor.swap.journal import Change, Journal


def change(log: list[str], name: str, fail: BaseException | None = None) -> Change:
    def do() -> None:
        log.append(f"+{name}")
        if fail is not None:
            raise fail

    return Change(name, do, lambda: log.append(f"-{name}"))


def test_restore_undoes_the_last_first_and_only_once() -> None:
    log: list[str] = []
    journal = Journal()
    for name in "abc":
        journal.make(change(log, name))
    journal.restore()
    journal.restore()
    assert log == ["+a", "+b", "+c", "-c", "-b", "-a"]
    assert len(journal) == 0


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_a_change_that_fails_half_way_is_taken_back_before_the_error_goes_on(error: BaseException) -> None:
    log: list[str] = []
    journal = Journal()
    journal.make(change(log, "a"))
    with pytest.raises(type(error)):
        journal.make(change(log, "b", fail=error))
    assert log == ["+a", "+b", "-b"]
    assert journal.changes == ["a"]


def test_an_exception_in_a_nested_part_takes_back_that_part_alone() -> None:
    log: list[str] = []
    journal = Journal()
    journal.make(change(log, "a"))

    def fails() -> None:
        with journal.nested(keep=True):
            journal.make(change(log, "b"))
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert journal.changes == ["a"]


def test_a_nested_part_ends_with_its_changes_unless_they_are_kept() -> None:
    log: list[str] = []
    journal = Journal()
    with journal.nested(keep=True):
        journal.make(change(log, "a"))
        with journal.nested():
            journal.make(change(log, "b"))
    assert journal.changes == ["a"]
    assert log == ["+a", "+b", "-b"]


def test_toggling_takes_all_back_in_reverse_and_makes_all_again_in_order() -> None:
    log: list[str] = []
    journal = Journal()
    for name in "ab":
        journal.make(change(log, name))
    journal.toggle(False)
    journal.toggle(False)
    journal.toggle(True)
    assert log == ["+a", "+b", "-b", "-a", "+a", "+b"]


def test_restoring_while_toggled_off_undoes_nothing_twice() -> None:
    log: list[str] = []
    journal = Journal()
    journal.make(change(log, "a"))
    journal.toggle(False)
    journal.restore()
    assert log == ["+a", "-a"]


def test_one_change_that_cannot_be_undone_keeps_no_other_from_it_and_is_named() -> None:
    log: list[str] = []

    def stuck() -> None:
        raise RuntimeError("stuck")

    with Journal() as journal:
        journal.make(change(log, "a"))
        journal.make(Change("b", lambda: None, stuck))
    assert log == ["+a", "-a"]
    assert journal.faults == ["b: RuntimeError: stuck"]

"""Each sentence of a guarantee says what result.json does, and rounds upwards."""

import pytest
from written import RESULT

from tanager.privacy.accountant import composed_epsilon
from tanager.privacy.mechanism import Mechanism
from tanager.report import guarantee


SEARCH = {"mean": 10.0, "shape": None, "held_out_examples": 3000, "values": {"lr": 1}}


def all_of(**fields):
    """All sentences on a result with these fields, but not the program."""
    found = RESULT | fields
    said = [guarantee.meaning(found), guarantee.mechanism(found)]
    return " ".join([*said, guarantee.accounting(found), *guarantee.assumptions(found)])


def test_persons_are_protected_whole_and_images_alone():
    sizes = {"2": 5.1231, "10": None}
    person = all_of(unit="person", examples_per_group=4, epsilon_of_person=sizes)
    for words in (
        "any conclusion about one person",
        "than if that person were not in the data",
        "on 50,000 persons.",
        "a Poisson sample of the persons",
        "took the mean gradient over at most 4 images of each, clipped it",
        "The guarantee is per person",
        "differ in one person.",
    ):
        assert words in person
    assert "per image" not in person
    image = all_of(epsilon_of_person=sizes)
    assert "ε is 5.124 with 2 images, infinite with 10 images." in image
    assert "on 50,000 examples." in image
    assert "per person" not in image
    assert "another" not in image
    assert "than if another image were in its place" in all_of(adjacency="replace-one")


def test_one_update_is_not_several():
    assert "made 1 update on" in all_of(steps=1)
    assert "made 2 updates on" in all_of(steps=2)


def test_what_was_released_besides_is_said():
    counted = all_of(class_counts_noise=12.5, unreadable="skip")
    assert "noise multiplier 12.5. ε includes this release." in counted
    assert "Images that could not be read contributed nothing" in counted
    assert "could not be read" not in all_of(unreadable="error")
    total = {"epsilon": 7.0001, "delta": 1e-5, "adjacency": "zero-out"}
    spent = all_of(account=total | {"accountant": "rdp"})
    assert "had spent ε = 7.001 at δ = 1e-05 together (zero-out, RDP)." in spent
    assert "Runs that were charged later are not in it." in spent
    assert "ε was computed with RDP by" in all_of(accountant="rdp")


def test_the_best_of_a_search_is_no_single_run():
    said = all_of(search=SEARCH)
    assert "the best of a secret random number of such runs, 10 on average" in said
    assert "ε covers the whole search." in said
    assert "computed with PLD" not in said
    alone = guarantee.reason_against({"private_search": True, "noise_multiplier": 1.0})
    assert "covers only the best of them" in alone


def test_right_guesses_are_rounded_upwards():
    risk = RESULT["risk"] | {"advantage": 0.30401}
    assert "the model at most 65.3 %" in guarantee.risk_in_words(risk)


@pytest.mark.parametrize("config", [{}, {"study": {}}, {"recipe": {"name": "digits"}}])
def test_tries_that_are_not_counted_are_said(config):
    uncounted = "each try spent privacy that the ε of this run does not count"
    for account in (None, {"epsilon": 1.0}):
        (said,) = guarantee.tuning(config, RESULT | {"account": account})
        assert uncounted in said
        assert ("The account of the data counts" in said) == (account is not None)


def test_the_program_takes_the_accountant_and_counts_class_counts(capsys):
    spent = RESULT | {"class_counts_noise": 4.0, "accountant": "rdp"}
    exec(guarantee.recomputation(spent), {})
    run = Mechanism(0.02, 1.5, 20)
    known = composed_epsilon([Mechanism(1.0, 4.0, 1), run], 1e-5, "rdp")
    assert float(capsys.readouterr().out) == pytest.approx(known, rel=1e-3)


@pytest.mark.parametrize(("shape", "shown"), [(None, 'float("inf")'), (0.0, "0.0")])
def test_the_program_takes_the_number_of_runs_of_a_search(shape, shown):
    program = guarantee.recomputation(RESULT | {"search": SEARCH | {"shape": shape}})
    assert f"dp_event.RepeatAndSelectDpEvent(run, 10.0, {shown})" in program
    assert "accountant.compose(search)" in program

"""Each sentence of a guarantee says what result.json does, and rounds upwards."""

import pytest
from small_report import Page, report, run_files
from written import RESULT

from tanager.privacy.accountant import composed_epsilon
from tanager.privacy.mechanism import Mechanism
from tanager.report import guarantee


SEARCH = {"mean": 10.0, "shape": None, "held_out_examples": 3000, "values": {"lr": 1}}


def all_of(**fields):
    """All sentences on a result with these fields, but not the program."""
    found = RESULT | fields
    said = [guarantee.protected(found), guarantee.meaning(found)]
    said.append(guarantee.mechanism(found))
    return " ".join([*said, guarantee.accounting(found), *guarantee.assumptions(found)])


def test_persons_are_protected_whole_and_images_alone():
    sizes = {"2": 5.1231, "10": None}
    person = all_of(unit="person", examples_per_group=4, epsilon_of_person=sizes)
    for words in (
        "Any conclusion about one person",
        "it would have if that person were not in the data, plus δ = 1e-05",
        "on 50,000 persons.",
        "a Poisson sample of the persons",
        "took the mean gradient over at most 4 images of each, clipped it",
        "The guarantee is per person",
        "differ in one person.",
    ):
        assert words in person
    assert "per image" not in person
    image = all_of(epsilon_of_person=sizes)
    assert "5.124 with 2 images, infinite with 10 images, at the same δ." in image
    assert "on 50,000 examples." in image
    assert "per person" not in image
    assert "another" not in image
    assert "would have if another image were in its place" in all_of(
        adjacency="replace-one"
    )


@pytest.mark.parametrize(
    ("delta", "chance"),
    [(2e-4, "2 in 10,000"), (1e-5, "1 in 100,000"), (0.25, "3 in 10")],
)
def test_delta_is_added_and_in_words_rounded_upwards(delta, chance):
    said = guarantee.meaning(RESULT | {"delta": delta})
    assert said.endswith(f"not in the data, plus δ = {delta:g} ({chance}).")


def test_duties_and_assumptions_are_not_said_as_facts():
    said = all_of()
    assert "private/ must stay secret for ever: with its secret seed anyone can" in said
    assert "Assumed is that the initial parameters do not depend" in said
    assert "used all of them, clipped" in all_of(sample_rate=1.0)


def test_a_page_claims_no_more_than_its_run(tmp_path):
    """No public number that is protected, no ε without noise, all runs' ε beside it."""
    config, result, metrics = run_files(adjacency="add-or-remove-one")
    total = {"epsilon": 9.87, "delta": 1e-4, "adjacency": "zero-out"}
    result |= {"account": total | {"accountant": "pld"}}
    words = Page(report(tmp_path / "a", config, result, metrics)).words
    assert "number of training images was declared without counting. The other" in words
    assert "not how many there are" not in words
    assert "ε of all runs on these data 9.87 test" in words
    config, result, metrics = run_files(seed=0)
    page = report(tmp_path / "b", config, result, metrics, drawn=True)
    words = Page(page).words
    assert page.count("<svg") == 1 and "ε spent" not in words
    assert "δ 0.0001 test accuracy" not in words
    assert "without tanager. This model must not claim it:" in words


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
    score = guarantee.held_out(SEARCH | {"score_noise": 2.5})
    assert "on 3,000 held-out examples, with noise of standard deviation 2.5" in score
    assert "likely too high" in score
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

"""The report of an audit, from the content of its audit.json alone."""

import pytest
from written import audit

from tanager.audit.bounds import Errors, SubsampledEstimator
from tanager.privacy.mechanism import Mechanism
from tanager.privacy.trade_off import TradeOff
from tanager.report import audit_figures, audit_page
from tanager.report.audit_page import sentence, write_report


@pytest.fixture
def found():
    return audit()


def written(tmp_path, found):
    path = write_report(tmp_path, found)
    assert path == tmp_path / "report.html"
    return path.read_text()


def test_it_says_what_was_found_in_plain_words(found):
    assert sentence(found) == (
        "An attacker who trains 1,200 models, half of them with one more example, "
        "proves, with confidence 0.999, that ε is at least 2: 25 % of the claimed "
        "8. If only the amount of noise can differ from the claim, ε is at least 5."
    )
    nothing = found | {"epsilon_lower_bound": 0.0, "trade_off_bound": 0.0}
    assert sentence(nothing | {"method": "one-run"}) == (
        "A stranger who has the trained model alone proves nothing about ε, with "
        "confidence 0.999."
    )
    same = found | {"trade_off_bound": 2.0, "method": "white-box"}
    assert sentence(same).startswith("An attacker who sees every update proves")
    assumed = " This holds if only the amount of noise can differ from the claim."
    assert sentence(same).endswith(assumed)
    assert "amount of noise" not in sentence(same | {"method": "one-run"})
    assert "amount of noise" not in sentence(nothing | {"method": "white-box"})


def test_what_is_proven_and_its_share_of_the_claim_are_rounded_down(found):
    said = sentence(found | {"epsilon_lower_bound": 1.9999})
    assert "at least 1.999: 24 % of the claimed 8." in said


def test_that_no_noise_explains_an_attack_is_said(tmp_path, found, monkeypatch):
    """Where more is recognised than was sampled, as if all examples were."""
    monkeypatch.setattr(audit_figures, "_POINTS", 2)
    refuted = SubsampledEstimator(1e-5, 0.95, Mechanism(0.1, 1.0, 1))
    bound = refuted.bound(Errors(0, 500, 100, 500))
    both = {"epsilon_lower_bound": bound, "trade_off_bound": bound, "violated": True}
    said = "ε is at least ∞: no amount of noise explains what it saw."
    assert said in sentence(found | both)
    page = written(tmp_path, found | both)
    assert said in page and "VIOLATED" in page


def test_the_page_stands_alone_and_the_same_audit_gives_the_same(
    tmp_path, found, monkeypatch
):
    monkeypatch.setattr(audit_figures, "_POINTS", 2)
    page = written(tmp_path, found)
    assert "digits &lt;&amp;&gt;" in page
    assert "Nothing here contradicts the claim" in page
    assert page.count('<svg role="img" aria-label="') == 3
    assert "measured on 1,200 models: by chance, its curve may cross the limit" in page
    for name in ("epsilon", "roc", "scores"):
        for ending in ("png", "svg"):
            assert (tmp_path / f"{name}.{ending}").stat().st_size > 1000
    for outside in ("http://", "https://", "<script", "<img"):
        assert outside not in page
    assert page == written(tmp_path, found)


def test_what_was_measured_stands_beside_the_mechanism_s_own_limit(found):
    of_all = audit_page.advantages(found)
    limit = TradeOff(Mechanism(**found["mechanism"])).advantage
    assert "advantage 0.600. No attack on this mechanism has an advantage above " in (
        of_all
    )
    assert f" above {limit:.2f}" in of_all
    assert "the claimed ε alone allows 0.999." in of_all
    assert "measured on 1,200 models, and have no interval" in of_all
    of_step = audit_page.advantages(found | {"method": "white-box", "knows_sample": 1})
    assert "on 1,200 canaries" in of_step


def test_a_violation_cannot_be_overlooked(tmp_path, found, monkeypatch):
    monkeypatch.setattr(audit_page, "_figures", lambda folder, found: [])
    page = written(tmp_path, found | {"violated": True, "epsilon_lower_bound": 9.0})
    assert "<h2>VIOLATED</h2>" in page
    assert "contradicts" not in page


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "one-run", "errors": None, "guesses": {"made": 3}, "setting": None}
        | {"mechanism": {"sample_rate": 1.0, "noise_multiplier": 2.0, "steps": 3}},
        {"method": "white-box", "knows_sample": True, "canaries": 500, "models": 1}
        | {"scores": {"inside": [1.0] * 30, "outside": [1.0] * 30}, "threshold": None},
    ],
)
def test_every_kind_of_audit_has_a_page(tmp_path, found, changes, monkeypatch):
    monkeypatch.setattr(audit_figures, "_POINTS", 2)
    page = written(tmp_path, found | changes)
    assert page.count("<svg") == 3
    assert "found nothing" not in page and "does not prove privacy: another" in page
    assert ("Poisson" in page) == bool(changes.get("knows_sample"))

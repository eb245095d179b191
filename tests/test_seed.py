import functools
import hashlib
import re

import numpy as np
import pytest

from tanager.seed import Seed


FIXED = Seed.from_int(7)


def test_os_seeds_are_private_and_differ():
    first, second = Seed.from_os(), Seed.from_os()
    assert first.private
    assert len(first.secret) == 32
    assert first.secret != second.secret


def test_an_os_seed_is_all_that_the_system_gave(monkeypatch):
    monkeypatch.setattr("secrets.token_bytes", lambda count: bytes(range(count)))
    assert Seed.from_os().secret == bytes(range(32))


def test_a_fixed_seed_is_reproducible_and_not_private():
    assert Seed.from_int(7) == FIXED
    assert not FIXED.private
    assert Seed.from_int(8).secret != FIXED.secret
    assert FIXED.secret == hashlib.blake2b(b"7", digest_size=32).digest()


def test_derive_is_a_keyed_hash_of_purpose_and_position():
    expected = hashlib.blake2b(
        b"noise/3/14", digest_size=16, key=FIXED.secret, person=b"tanager-derive"
    )
    assert FIXED.derive("noise", 3, 14, size=16) == expected.digest()


def test_derived_streams_are_all_different():
    streams = [
        FIXED.derive(purpose, *position)
        for purpose in ("sampling", "noise")
        for position in ((), (0,), (1,), (0, 0), (0, 1), (1, 0), (10,))
    ]
    streams.append(Seed.from_int(8).derive("sampling"))
    assert len(set(streams)) == len(streams)


@pytest.mark.parametrize(
    ("purpose", "position", "message"),
    [
        ("noise/3", (), "purpose (='noise/3') must have no /: its position comes"),
        ("noise", (1.5,), "position (=1.5) must be a whole number"),
        ("noise", (-1,), "position (=-1) must be at least 0"),
    ],
)
def test_no_two_names_are_of_one_stream(purpose, position, message):
    """ "noise/3" would be step 3 of "noise", and so would a step of 3.5."""
    for draw in (FIXED.derive, FIXED.generator, functools.partial(FIXED.words, 4)):
        with pytest.raises(ValueError, match=re.escape(message)):
            draw(purpose, *position)


def test_words_differ_by_purpose_and_position_and_begin_anywhere():
    words = FIXED.words(12, "noise", 3)
    assert FIXED.words(8, "noise", 3, start=4).tolist() == words[4:].tolist()
    streams = [
        words,
        FIXED.words(12, "noise", 4),
        FIXED.words(12, "sampling", 3),
        Seed.from_int(8).words(12, "noise", 3),
    ]
    assert len({*np.concatenate(streams).tolist()}) == 48
    with pytest.raises(AssertionError):
        FIXED.words(1, "noise", 3, start=3)


def test_a_fingerprint_depends_on_the_secret_and_the_content():
    fingerprint = FIXED.fingerprint(b"content")
    assert re.fullmatch("[0-9a-f]{32}", fingerprint)
    assert FIXED.fingerprint(b"content") == fingerprint
    assert FIXED.fingerprint(b"other") != fingerprint
    assert Seed.from_int(8).fingerprint(b"content") != fingerprint
    # Not a stream that `derive` hands out under the same name.
    assert fingerprint != FIXED.derive("content", size=16).hex()


@pytest.mark.parametrize("size", [1, 32, 64])
def test_derive_gives_the_size_asked_for(size):
    assert len(FIXED.derive("noise", size=size)) == size


def test_the_secret_is_never_printed():
    seed = Seed(bytes(range(32)))
    for text in (repr(seed), str(seed), f"{seed}"):
        assert text == "Seed(<secret>, private=True)"


@pytest.mark.parametrize("secret", [b"short", bytes(31), bytes(33), "x" * 32, 7])
def test_a_secret_of_another_form_is_refused(secret):
    with pytest.raises(ValueError, match=re.escape("secret must be 32 bytes: use")):
        Seed(secret)


@pytest.mark.parametrize("number", [-1, 1.5, True])
def test_from_int_takes_whole_numbers_only(number):
    with pytest.raises(ValueError, match=re.escape(f"seed (={number!r}) must be")):
        Seed.from_int(number)


def test_generators_differ_by_purpose_and_position_and_come_again():
    seed = Seed.from_int(1)
    drawn = [
        seed.generator(purpose, *position).random(4).tolist()
        for purpose, position in (
            ("coins", ()),
            ("coins", (1,)),
            ("noise", ()),
            ("coins", ()),
        )
    ]
    assert drawn[0] == drawn[3]
    assert len({tuple(each) for each in drawn}) == 3
    assert Seed.from_int(2).generator("coins").random(4).tolist() != drawn[0]

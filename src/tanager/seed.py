"""The secret a run's randomness grows from.

Who was sampled, and which noise hid them, must be unpredictable to whoever sees the
model. One 256-bit secret comes from the operating system; everything else is derived
from it by a keyed hash (BLAKE2b, a pseudo-random function), named by purpose and
position. So the randomness of any step can be computed again without the steps before
it, no two purposes share a stream, and a stream reveals nothing of the secret.
"""

import dataclasses
import hashlib
import secrets
from typing import Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tanager import _validate as validate


@dataclasses.dataclass(frozen=True, repr=False)
class Seed:
    """A 256-bit secret seed.

    Attributes:
        secret: 32 bytes. Never printed: `repr` and `str` do not contain them.
        private: False when the seed was fixed by a person (`from_int`): whoever knows
            the number can subtract the noise, so such a run has no privacy guarantee.

    Raises:
        ValueError: `secret` is not 32 bytes long.
    """

    secret: bytes
    private: bool = True

    def __post_init__(self):
        if not isinstance(self.secret, bytes) or len(self.secret) != 32:
            raise ValueError("secret must be 32 bytes: use Seed.from_os()")

    @classmethod
    def from_os(cls) -> Self:
        """Draw a seed from the operating system's cryptographic generator."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def from_int(cls, number: int) -> Self:
        """Make a reproducible seed, for tests and simulations: NOT private."""
        validate.whole(seed=number, at_least=0)
        digest = hashlib.blake2b(str(int(number)).encode(), digest_size=32)
        return cls(digest.digest(), private=False)

    def derive(self, purpose: str, *position: int, size: int = 32) -> bytes:
        """Return up to 64 pseudo-random bytes for a purpose, such as ``"noise"``.

        The position is of whole numbers from 0, such as the step. Any other name is of
        other bytes.

        Raises:
            ValueError: the purpose has a slash, or a number is out of range.
        """
        if "/" in purpose:
            rule, remedy = "must have no /", "its position comes after it, as numbers"
            validate.refuse("purpose", purpose, rule, remedy)
        for number in position:
            validate.whole(position=number, at_least=0)
        name = "/".join([purpose, *(str(int(number)) for number in position)])
        digest = hashlib.blake2b(
            name.encode(), digest_size=size, key=self.secret, person=b"tanager-derive"
        )
        return digest.digest()

    def words(
        self, count: int, purpose: str, *position: int, start: int = 0
    ) -> np.ndarray:
        """Return secret uniform words, by AES-256 in counter mode.

        Batches and noise are made of them: whoever sees any number of words can
        predict no other.

        Args:
            count: how many.
            purpose: what they are for; the cipher's key is derived from it.
            position: whole numbers, such as the step.
            start: how many words of this stream to leave out, an even number.

        Returns:
            uint64[count], the same in every version and on every machine.
        """
        assert start % 2 == 0
        key = self.derive(purpose, *position)
        counter = (start // 2).to_bytes(16, "big")
        cipher = Cipher(algorithms.AES(key), modes.CTR(counter)).encryptor()
        stream = cipher.update(bytes(8 * count))
        return np.frombuffer(stream, "<u8").astype(np.uint64, copy=False)

    def generator(self, purpose: str, *position: int) -> np.random.Generator:
        """Return a generator of random numbers for this purpose and position.

        For what happens once or seldom; batches and noise have their own.
        """
        key = np.frombuffer(self.derive(purpose, *position, size=16), "<u8")
        return np.random.Generator(np.random.Philox(key=key))

    def fingerprint(self, content: bytes) -> str:
        """Return a keyed hash of `content`: 32 hexadecimal digits.

        Whoever lacks the secret can neither compute it nor test a guess at `content`.
        """
        digest = hashlib.blake2b(
            content, digest_size=16, key=self.secret, person=b"tanager-print"
        )
        return digest.hexdigest()

    def __repr__(self) -> str:
        return f"Seed(<secret>, private={self.private})"

"""Budget: an amount of money that is shared out. The module imports little, so that a command refuses a wrong budget at
once."""

from __future__ import annotations

from dataclasses import dataclass

from flsv.utilities.choices import Negatives
from flsv.utilities.declared import Positive, checked
from flsv.utilities.errors import ConfigurationError

#: Currencies whose amounts have no decimals, and those with three; all others have two.
WHOLE = "BIF CLP DJF GNF ISK JPY KMF KRW PYG RWF UGX VND VUV XAF XOF XPF"
THREE = "BHD IQD JOD KWD LYD OMR TND"


@checked
@dataclass(frozen=True)
class Budget:
    """A budget, and the rule by which it is shared out.

    Args:
        amount: the amount to be shared out.
        by: the name of a metric of the run, or ``"retrained"``. None: values by retraining if there are any, else the
            run's only metric that is suitable for payment.
        rule: the treatment of values below 0, see :func:`flsv.allocate`.
        currency: the currency's code, such as ``"EUR"``; it determines the number of decimals.
        judged_by_partners: whether to accept values for which the clients scored the models on their own validation
            samples.

    Raises:
        ConfigurationError: an argument is out of range, or the amount has more decimals than the currency.

    Example:
        >>> Budget(100, currency="EUR").text(33.3), Budget(1_000_000, currency="JPY").text(123456)
        ('33.30 EUR', '123,456 JPY')
    """

    amount: Positive
    by: str | None = None
    rule: Negatives = "zero"
    currency: str = ""
    judged_by_partners: bool = False

    def __post_init__(self) -> None:
        if round(self.amount, self.decimals) != self.amount:
            raise ConfigurationError(
                f"a budget of {self.amount} {self.currency}: expected {self.decimals} decimals at most."
            )

    @property
    def decimals(self) -> int:
        code = self.currency.upper()
        return 0 if code in WHOLE.split() else 3 if code in THREE.split() else 2

    @property
    def unit(self) -> float:
        """Return the smallest amount of the currency, such as 0.01."""
        return float(f"1e-{self.decimals}")

    def text(self, amount: float) -> str:
        """Return an amount as text, with the currency's decimals and its code."""
        return f"{amount:,.{self.decimals}f} {self.currency}".rstrip()

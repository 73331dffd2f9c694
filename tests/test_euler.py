"""What chapter 2 cannot hold: exactness in rational arithmetic over many drawn problems."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoeuler.euler import euler_step, heun_step, integrate, relative_step, rk4_step

ORDER = {euler_step: 1, heun_step: 2, rk4_step: 4}  # for these three also the evaluations a step
every_method = pytest.mark.parametrize("step", ORDER)
fractions = st.fractions(min_value=-3, max_value=3, max_denominator=8)


def polynomial(coefficients, t):
    return sum(c * t**power for power, c in enumerate(coefficients))


def derivative(coefficients, t):
    return sum(power * c * t ** (power - 1) for power, c in enumerate(coefficients) if power)


@every_method
@given(data=st.data())
def test_a_method_of_order_p_is_exact_on_polynomials_of_degree_p(step, data):
    size = ORDER[step] + 1
    coefficients = data.draw(st.lists(fractions, min_size=size, max_size=size))
    t0, t1, n = data.draw(fractions), data.draw(fractions), data.draw(st.integers(1, 5))
    truth = [polynomial(coefficients, t0 + (t1 - t0) * i / n) for i in range(n + 1)]
    assert integrate(step, lambda x, t: derivative(coefficients, t), truth[0], t0, t1, n) == truth


@every_method
@given(n=st.integers(1, 6))
def test_and_misses_one_degree_higher_by_what_its_rule_predicts(step, n):
    p = ORDER[step]
    walk = integrate(step, lambda x, t: (p + 1) * t**p, Fraction(0), Fraction(0), Fraction(1), n)
    # Of the left-end rule, the trapezoid and Simpson's rule on [0, 1], for which these are exact.
    predicted = {1: Fraction(-1, n), 2: Fraction(1, 2 * n**2), 4: Fraction(1, 24 * n**4)}
    assert walk[-1] - 1 == predicted[p]


@every_method
@given(rate=fractions, h=fractions)
def test_a_linear_step_is_the_exponential_series_through_order_p(step, rate, h):
    term = series = Fraction(1)
    for power in range(1, ORDER[step] + 1):
        term = term * rate * h / power
        series += term
    assert step(lambda x, t: rate * x, Fraction(1), Fraction(0), h) == series


def local_order(step):
    """The order p that halving one small step shows, on an equation neither linear nor blind to t.

    dx/dt = -2 t x^2 from t = 1/2, off the centre of x = 1 / (1 + t^2), so that no term vanishes.
    """
    t0, misses = Fraction(1, 2), []
    for h in (Fraction(1, 1000), Fraction(1, 2000)):
        x = step(lambda x, t: -2 * t * x**2, 1 / (1 + t0**2), t0, h)
        misses.append(abs(x - 1 / (1 + (t0 + h) ** 2)))
    return np.log2(float(misses[0] / misses[1])) - 1


@every_method
def test_the_order_on_a_nonlinear_equation(step):
    # The local error is c h^(p+1) (1 + O(h)); h = 1/1000 moves the exponent by < 0.01.
    assert local_order(step) == pytest.approx(ORDER[step], abs=0.01)


def rk4_with(middle, last, weights):
    """Kutta's method with a mistake: where k3 starts from, when k4 asks, how the k are weighted."""

    def step(f, x, t, h):
        k1 = f(x, t)
        k2 = f(x + h / 2 * k1, t + h / 2)
        k3 = f(x + h / 2 * (k1 if middle == "k1" else k2), t + h / 2)
        k4 = f(x + h * k3, t + last * h)
        return x + h * sum(w * k for w, k in zip(weights, (k1, k2, k3, k4), strict=True)) / 6

    return step


def test_the_order_test_sees_small_mistakes():
    assert local_order(rk4_with("k2", 1, (1, 2, 2, 1))) > 3.99  # the method itself
    assert local_order(rk4_with("k2", Fraction(1, 2), (1, 2, 2, 1))) < 1.01  # k4 asks too early
    assert local_order(rk4_with("k2", 1, (2, 1, 1, 2))) < 2.01  # weights swapped: still consistent
    assert local_order(rk4_with("k1", 1, (1, 2, 2, 1))) < 2.01  # k3 does not stand on k2


@every_method
@given(n=st.integers(1, 20))
def test_the_price_is_the_evaluations(step, n):
    asked = []
    integrate(step, lambda x, t: asked.append(t) or x, 1.0, 0.0, 1.0, n)
    assert len(asked) == ORDER[step] * n


@every_method
def test_every_element_of_an_array_walks_by_itself(step):
    rates = np.random.default_rng(0).standard_normal(12)
    together = integrate(step, lambda x, t: rates * x, np.ones(12), 0.0, 1.0, 7)[-1]
    alone = [integrate(step, lambda x, t, r=r: r * x, 1.0, 0.0, 1.0, 7)[-1] for r in rates]
    assert together.tolist() == alone


@every_method
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_the_dtype_of_the_stream_is_kept(step, dtype):
    walk = integrate(step, lambda x, t: x / 2, np.ones(3, dtype), 0, 4, 4)
    assert [x.dtype for x in walk] == [dtype] * 5


def test_walks_that_cannot_be_are_refused():
    with pytest.raises(AssertionError, match="at least one step"):
        integrate(euler_step, lambda x, t: x, 1.0, 0.0, 1.0, 0)
    with pytest.raises(AssertionError, match="turned shape"):
        integrate(euler_step, lambda x, t: np.ones((2, 3)), np.ones(3), 0.0, 1.0, 1)
    with pytest.raises(AssertionError, match="the stream is"):
        relative_step(np.ones((2, 3)), np.ones(3))


@given(scale=st.floats(0.125, 8), h=st.floats(0.125, 8))
def test_the_relative_step_has_no_units(scale, h):
    x, fx = np.random.default_rng(1).standard_normal((2, 4, 6))
    by_hand = h * np.sqrt((fx**2).sum(-1) / (x**2).sum(-1))
    # About ten operations, each rounded to one part in 2^53: 1e-14 leaves a factor of ten.
    np.testing.assert_allclose(relative_step(scale * x, scale * fx, h), by_hand, rtol=1e-14)

"""What chapter 3 cannot hold: exactness in rational arithmetic over many drawn problems."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoeuler.model.integrators import INTEGRATORS, Tableau, integrate, relative_step

ORDER = {"euler": 1, "heun": 2, "rk4": 4}  # for these three also the evaluations a step
every_method = pytest.mark.parametrize("name", ORDER)
fractions = st.fractions(min_value=-3, max_value=3, max_denominator=8)


def exact(name):
    """The step of INTEGRATORS[name] in fractions; their floats are the ones of the table."""
    tableau = INTEGRATORS[name]
    a, b = [[Fraction(v).limit_denominator(6) for v in row] for row in tableau.a], tableau.b
    b = [Fraction(v).limit_denominator(6) for v in b]
    assert tuple(tuple(map(float, row)) for row in a) == tableau.a
    assert tuple(map(float, b)) == tableau.b
    return Tableau(a, b).step


def test_the_tables_have_the_form_that_the_step_needs():
    assert set(INTEGRATORS) == set(ORDER)
    for name, (a, b) in INTEGRATORS.items():
        assert [len(row) for row in a] == list(range(len(b)))  # explicit
        assert exact(name)(lambda x, t: 1, Fraction(0), Fraction(0), Fraction(1)) == 1  # sum of b


@every_method
def test_the_questions_are_asked_at_the_time_of_their_place(name):
    """Along dx/dt = 1 from x = t, every question must find x = t."""
    asked = []
    exact(name)(lambda x, t: asked.append((x, t)) or 1, Fraction(2), Fraction(2), Fraction(3))
    assert len(asked) == ORDER[name] and all(x == t for x, t in asked)
    assert [t for _, t in asked] == {
        "euler": [2], "heun": [2, 5], "rk4": [2, Fraction(7, 2), Fraction(7, 2), 5],
    }[name]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float64, np.complex128])
def test_the_tables_are_the_formulas_of_the_chapter(dtype):
    def f(x, t):
        return np.sin(3 * x) - t * x

    def by_hand(name, x, t, h):
        k1 = f(x, t)
        if name == "euler":
            return x + h * k1
        if name == "heun":
            return x + h / 2 * (k1 + f(x + h * k1, t + h))
        k2 = f(x + h / 2 * k1, t + h / 2)
        k3 = f(x + h / 2 * k2, t + h / 2)
        return x + h / 6 * (k1 + 2 * k2 + 2 * k3 + f(x + h * k3, t + h))

    x = np.random.default_rng(2).standard_normal(9).astype(dtype)
    for name, tableau in INTEGRATORS.items():
        # About thirty roundings of numbers near 1, each at most 1e-16 and at most tripled by f.
        np.testing.assert_allclose(tableau.step(f, x, 0.3, 0.2), by_hand(name, x, 0.3, 0.2), 1e-14)


def polynomial(coefficients, t):
    return sum(c * t**power for power, c in enumerate(coefficients))


def derivative(coefficients, t):
    return sum(power * c * t ** (power - 1) for power, c in enumerate(coefficients) if power)


@every_method
@given(data=st.data())
def test_a_method_of_order_p_is_exact_on_polynomials_of_degree_p(name, data):
    size, step = ORDER[name] + 1, exact(name)
    coefficients = data.draw(st.lists(fractions, min_size=size, max_size=size))
    t0, t1, n = data.draw(fractions), data.draw(fractions), data.draw(st.integers(1, 5))
    truth = [polynomial(coefficients, t0 + (t1 - t0) * i / n) for i in range(n + 1)]
    assert integrate(step, lambda x, t: derivative(coefficients, t), truth[0], t0, t1, n) == truth


@every_method
@given(n=st.integers(1, 6))
def test_and_misses_one_degree_higher_by_what_its_rule_predicts(name, n):
    p, zero = ORDER[name], Fraction(0)
    walk = integrate(exact(name), lambda x, t: (p + 1) * t**p, zero, zero, Fraction(1), n)
    # Of the left-end rule, the trapezoid and Simpson's rule on [0, 1], for which these are exact.
    predicted = {1: Fraction(-1, n), 2: Fraction(1, 2 * n**2), 4: Fraction(1, 24 * n**4)}
    assert walk[-1] - 1 == predicted[p]


@every_method
@given(rate=fractions, h=fractions)
def test_a_linear_step_is_the_exponential_series_through_order_p(name, rate, h):
    term = series = Fraction(1)
    for power in range(1, ORDER[name] + 1):
        term = term * rate * h / power
        series += term
    assert exact(name)(lambda x, t: rate * x, Fraction(1), Fraction(0), h) == series


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
def test_the_order_on_a_nonlinear_equation(name):
    # The local error is c h^(p+1) (1 + O(h)); h = 1/1000 moves the exponent by < 0.01.
    assert local_order(exact(name)) == pytest.approx(ORDER[name], abs=0.01)


def rk4_with(a=((), (3,), (0, 3), (0, 0, 6)), b=(1, 2, 2, 1)):
    """The step of Kutta's table, given in sixths, with a mistake in it."""
    return Tableau([[Fraction(v, 6) for v in row] for row in a], [Fraction(v, 6) for v in b]).step


def test_the_order_test_sees_small_mistakes():
    assert local_order(rk4_with()) > 3.99  # the method itself
    assert local_order(rk4_with(a=((), (3,), (0, 3), (0, 0, 3)))) < 1.01  # k4 asks too early
    assert local_order(rk4_with(b=(2, 1, 1, 2))) < 2.01  # weights swapped: still consistent
    assert local_order(rk4_with(a=((), (3,), (3, 0), (0, 0, 6)))) < 2.01  # k3 stands on k1


def test_a_question_of_weight_zero_is_not_added():
    answers = iter((np.inf, 1.0))
    step = Tableau(((), (0.0,)), (0.0, 1.0)).step
    assert step(lambda x, t: next(answers), 0.0, 0.0, 1.0) == 1.0  # 0 times infinity would be nan


@every_method
@given(n=st.integers(1, 20))
def test_the_price_is_the_evaluations(name, n):
    asked = []
    integrate(INTEGRATORS[name].step, lambda x, t: asked.append(t) or x, 1.0, 0.0, 1.0, n)
    assert len(asked) == ORDER[name] * n == len(INTEGRATORS[name].b) * n


@every_method
def test_every_element_of_an_array_walks_by_itself(name):
    step = INTEGRATORS[name].step
    rates = np.random.default_rng(0).standard_normal(12)
    together = integrate(step, lambda x, t: rates * x, np.ones(12), 0.0, 1.0, 7)[-1]
    alone = [integrate(step, lambda x, t, r=r: r * x, 1.0, 0.0, 1.0, 7)[-1] for r in rates]
    assert together.tolist() == alone


@every_method
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.complex128])
def test_the_dtype_of_the_stream_is_kept(name, dtype):
    walk = integrate(INTEGRATORS[name].step, lambda x, t: x / 2, np.ones(3, dtype), 0, 4, 4)
    assert [x.dtype for x in walk] == [dtype] * 5


def test_walks_that_cannot_be_are_refused():
    step = INTEGRATORS["euler"].step
    with pytest.raises(AssertionError, match="at least one step"):
        integrate(step, lambda x, t: x, 1.0, 0.0, 1.0, 0)
    with pytest.raises(AssertionError, match="turned shape"):
        integrate(step, lambda x, t: np.ones((2, 3)), np.ones(3), 0.0, 1.0, 1)
    with pytest.raises(AssertionError, match="the stream is"):
        relative_step(np.ones((2, 3)), np.ones(3))


@given(scale=st.floats(0.125, 8), h=st.floats(0.125, 8))
def test_the_relative_step_has_no_units(scale, h):
    x, fx = np.random.default_rng(1).standard_normal((2, 4, 6))
    by_hand = h * np.sqrt((fx**2).sum(-1) / (x**2).sum(-1))
    # About ten operations, each rounded to one part in 2^53: 1e-14 leaves a factor of ten.
    np.testing.assert_allclose(relative_step(scale * x, scale * fx, h), by_hand, rtol=1e-14)

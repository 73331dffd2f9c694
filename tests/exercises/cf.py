"""Wrong answers to the exercises of appendix F, each of which its check must refuse."""

import contextlib

import numpy as np

from nanoeuler.errors import UserError

CHAPTER = "f-command-line"
NAMES = dict(np=np, contextlib=contextlib, UserError=UserError)

WHOLE = "if value.denominator == 1:\n            return int(value)"
# (exercise, what is wrong, text of the solution, what it becomes)
ANSWERS = [
    ("amount", "a float", "Fraction(match[1])", "float(match[1])\n        value = Fraction(value)"),
    ("amount", "rounded", WHOLE, "return round(value)"),
    ("amount", "cut off", WHOLE, "return int(value)"),
    ("amount", "no whole number", "return int(value)", "return float(value)"),
    ("amount", "a fraction", "return int(value)", "return value"),
    ("amount", "the unit is lost", " * units[match[2]]", ""),
    ("amount", "any unit, worth 1", "units[match[2]]", "1"),
    ("amount", "an unknown unit is worth 1", "match[2] in units", "True"),
    ("amount", "digits of all alphabets", "[0-9]+(?:", r"\d+(?:"),
    ("amount", "a sign", "([0-9]+(?:", "([+-]?[0-9]+(?:"),
    ("amount", "no point", r"(?:\.[0-9]+)?", ""),
    ("amount", "a comma, too", r"(?:\.[0-9]+)?)", r"(?:[.,][0-9]+)?)"),
    ("amount", "nothing behind the point", r"\.[0-9]+", r"\.[0-9]*"),
    ("amount", "any blanks", ") ?(", r")\s*("),
    ("amount", "no blank", ") ?(", ")("),
    ("amount", "the beginning will do", "re.fullmatch", "re.match"),
    ("amount", "anywhere", "re.fullmatch", "re.search"),
    ("amount", "blanks around it", ', text)\n', ', text.strip())\n'),
    ("amount", "underscores", "([0-9]+(?:", "([0-9_]+(?:"),
    ("amount", "capitals do not count", "match[2] in units:",
     "(match[2] in units or match[2].upper() in units or match[2].lower() in units):"),
    ("amount", "the text as it came", "quoted(repr(text))", "text"),
    ("amount", "what came is not said", "got {quoted(repr(text))}", "got another"),
    ("amount", "the units are not said", "({names})", ""),
    ("amount", "an error of another kind", "raise UserError(", "raise ValueError("),
    ("amount", "None", "raise UserError(", "return print("),
    ("guarded", "another code", "return 2", "return 1"),
    ("guarded", "no code", "return 2", "return None"),
    ("guarded", "true is not 0", "action()\n        return 0", "action()\n        return False"),
    ("guarded", "whatever the action returns", "action()\n        return 0", "return action()"),
    ("guarded", "nobody reads: an error", "except BrokenPipeError:\n        return 0",
     "except BrokenPipeError:\n        return 2"),
    ("guarded", "all connections", "except BrokenPipeError:", "except ConnectionError:"),
    ("guarded", "all errors of the system", "except BrokenPipeError:", "except OSError:"),
    ("guarded", "every error is the user's", "except UserError as", "except Exception as"),
    ("guarded", "values are the user's", "except UserError as",
     "except (UserError, ValueError) as"),
    ("guarded", "the lines of the error", '" ".join(str(error).split())', "str(error)"),
    ("guarded", "its first line", '" ".join(str(error).split())',
     "(str(error).splitlines() or [''])[0]"),
    ("guarded", "line ends alone", '" ".join(str(error).split())',
     'str(error).replace("\\n", " ")'),
    ("guarded", "as Python shows it", "str(error)", "repr(error)"),
    ("guarded", "without a name", 'f"nanoeuler: {line}"', "line"),
    ("guarded", "Ctrl-C goes through", "except KeyboardInterrupt:", "except SystemExit:"),
    ("guarded", "Ctrl-C says nothing", 'line = "interrupted"', "return 2"),
    ("guarded", "Ctrl-C has a code of its own", 'line = "interrupted"',
     'say("nanoeuler: interrupted")\n        return 130'),
    ("guarded", "a line that nobody reads is an error",
     "with contextlib.suppress(BrokenPipeError):", "if True:"),
    ("guarded", "said twice", 'say(f"nanoeuler: {line}")',
     'say(f"nanoeuler: {line}")\n        say(f"nanoeuler: {line}")'),
    ("guarded", "begun again", "except UserError as error:", "except UserError as error:\n"
     "        with contextlib.suppress(UserError):\n            action()"),
]

"""The words of the scripted engine in each tutorial: some of it right, so that there is something to compare."""

from __future__ import annotations

from tests.kit.engine_script import Rule

MEND_MEDIAN = (
    "sed -i 's/    return ordered.*/    middle = len(ordered) \\/\\/ 2\\n"
    "    return (ordered[middle] + ordered[-middle - 1]) \\/ 2/' stats.py && echo mended"
)
STORIES: dict[str, tuple[Rule, ...]] = {
    "math": (
        Rule("Python says 7.", "7"),
        Rule("Python says 42.", "42"),
        Rule("3 + 4 = ?", "python(3 + 4)"),
        Rule("17 + 25 = ?", "python(17 + 25)"),
        Rule("9 - 6 = ?", "It is 3"),
        Rule("6 * 7 = ?", "It is 41"),
    ),
    "cocktail": (Rule("2 + 3", "5"), Rule("opposite of hot", "Cold."), Rule("Paris", "Yes"), Rule("fire", "Yes")),
    "live": (Rule("cat", "A small animal that purrs"), Rule("sun", "Very old")),
    "critic": (Rule("right?", "yes"), Rule("2 + 3", "5"), Rule("1 + 1", "2"), Rule("= ?", "9")),
    "team": (Rule("sun", "q"), Rule("moon", "c"), Rule("yes", "s"), Rule("no", "x")),
    "puzzles": (Rule("words: hundred, go", "go, hundred"), Rule("words: the, by", "by, the"), Rule("words:", "no")),
    "traffic": (Rule("Guess my number", "10"), Rule("Higher.", "15"), Rule("Lower.", "5"), Rule("I said", "I am lost")),
    "coding": (
        Rule("mended", "Done."),
        Rule("function median", tool="bash", arguments={"command": MEND_MEDIAN, "description": "Mends it"}),
        Rule("function spread", "I would rather not."),
    ),
}
STORIES["laptop"] = STORIES["math"]

"""Prompts over tables, logs, settings, lists and sums that are made up here, from word lists and a seed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

from benchmarks.corpus.made import HEAVY, LIGHT, MEDIUM, Made

Row = dict[str, str | int]
Setting = str | int | float | bool

# Tables: name, the columns, what stands in the first column, a second text column, the range of the numbers

THEMES: tuple[tuple[str, tuple[str, str, str, str], str, str, tuple[int, int]], ...] = (
    ("bicycle hire", ("bicycle", "station", "trips", "kilometres"),
     "Wren Merle Lark Finch Tit Swift Heron Crane Rook Dove", "North Quay Mill Park Gate", (2, 96)),
    ("tea harvest", ("garden", "pluck", "baskets", "helpers"),
     "Hillside Riverbend Old-Wall Fern Terrace Chapel Ridge Hollow Spring Dam", "first second autumn", (8, 140)),
    ("tram lines", ("line", "depot", "stops", "minutes"),
     "T1 T2 T4 T7 T9 T11 T12 T15 T18 T20", "Southern Canal Foundry", (9, 64)),
    ("choir", ("singer", "voice", "rehearsals", "years"),
     "Agathe Birger Celia Dunja Emil Feodor Gunda Henrik Ivana Jorge", "soprano alto tenor bass", (1, 39)),
    ("rain gauges", ("gauge", "keeper", "millimetres", "days"),
     "Alp Bog Cove Dell Edge Ford Glen Heath Isle Knoll", "school parsonage mill", (3, 121)),
    ("market stalls", ("stall", "goods", "visitors", "metres"),
     "A3 A5 B2 B8 C1 C4 D6 D9 E2 E7", "cheese herbs baskets knives soap", (2, 230)),
    ("bee hives", ("hive", "meadow", "frames", "kilos"),
     "Amber Basil Clover Dill Elder Fennel Gorse Hazel Iris Juniper", "upper lower orchard", (4, 48)),
    ("cinema week", ("film", "hall", "seats", "minutes"),
     "Tin-Moon Ladder Nine-Gates Slow-Water Paper-King Glass-Road Late-Bus Salt-House", "red blue small", (61, 188)),
    ("seed packets", ("plant", "colour", "packets", "weeks"),
     "aster borage cosmos dahlia flax lupin marigold nigella poppy zinnia", "white pink blue yellow", (3, 77)),
    ("workshop", ("tool", "owner", "loans", "age"),
     "plane vice rasp chisel lathe clamp mallet awl brace spokeshave", "Ester Pavel Rune Tilda", (1, 58)),
    ("lighthouses", ("tower", "coast", "height", "steps"),
     "Barlow Cormoran Drift Ember Falk Gannet Holm Inver Jetty Kilda", "west east north", (12, 260)),
    ("reading club", ("book", "reader", "pages", "minutes"),
     "Marsh Orbit Thimble Quartz Lantern Saffron Gravel Mosaic Ripple Velvet", "Noor Matteo Signe Lucia", (4, 610)),
)  # fmt: skip

TABLE_TASKS = (
    (HEAVY, "Print the table again, ordered by {c}, the largest first."),
    (LIGHT, "Which row has the smallest number in the column {c}, and what else does it say?"),
    (MEDIUM, "Show only the rows in which {c} is above the mean of that column."),
    (LIGHT, "Suggest a title and a caption for this table."),
    (HEAVY, "Remove the row of {first} and print what is left."),
    (LIGHT, "Describe in two sentences what stands out."),
    (MEDIUM, "Make a smaller table with only the columns {a} and {d}."),
    (LIGHT, "What does this table about the {theme} not tell us? Name three things."),
)
TABLE_EXTRA = ((HEAVY, "Double every number in {c} and give the complete table."), (LIGHT, "Add up {c} and {d}."))
TRANSFORM_TASKS = (
    (HEAVY, "Convert this to JSON, one object for each row."),
    (LIGHT, "Which SQL type would each column have, and what is the key?"),
    (HEAVY, "Write the same data as CSV with semicolons."),
    (LIGHT, "Write a Python expression that gives the sum of {c}, if the rows are dictionaries in a list `rows`."),
    (MEDIUM, "Write two INSERT statements for the first two rows."),
    (LIGHT, "Explain how to find the largest {d} for each {b} with a spreadsheet."),
    (HEAVY, "Turn these rows into a YAML list."),
    (MEDIUM, "Write one line a row in the form `{a}: {c}`."),
)


def tables() -> Iterator[Made]:
    """Two prompts of the family table and two of data-transform for most themes."""
    for i, (theme, columns, keys, kinds, numbers) in enumerate(THEMES):
        rng = random.Random(f"table {theme}")
        group = f"table-{theme.replace(' ', '-')}"
        names = dict(zip("abcd", columns, strict=True), theme=theme)
        for family, tasks, shift in (
            ("table", TABLE_TASKS, 0),
            ("data-transform", TRANSFORM_TASKS, 0),
            ("data-transform", TRANSFORM_TASKS, 5),
            ("table", TABLE_TASKS[1::2] + TABLE_EXTRA, 3),
        ):
            rows = _rows(rng, columns, keys.split(), kinds.split(), numbers, rng.randint(4, 6))
            repetition, task = tasks[(i + shift) % len(tasks)]
            words = task.format(first=rows[0][columns[0]], **names)
            markdown = family == "table" or i % 3 == 0
            render = _markdown if markdown else (_csv if i % 3 == 1 and "CSV" not in words else _labelled)
            text = render(rows)
            yield Made(
                family, repetition, group, (f"{words}\n\n{text}" if rng.random() < 0.6 else f"{text}\n\n{words}",)
            )


def _rows(
    rng: random.Random, columns: Sequence[str], keys: list[str], kinds: list[str], numbers: tuple[int, int], count: int
) -> list[Row]:
    chosen = rng.sample(keys, count)
    return [
        dict(zip(columns, (key, rng.choice(kinds), rng.randint(*numbers), rng.randint(*numbers)), strict=True))
        for key in chosen
    ]


def _markdown(rows: list[Row]) -> str:
    lines = [rows[0].keys(), ["---"] * len(rows[0]), *(row.values() for row in rows)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def _csv(rows: list[Row]) -> str:
    return "\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)])


def _labelled(rows: list[Row]) -> str:
    return "\n".join(", ".join(f"{k} {v}" for k, v in row.items()) for row in rows)


# Logs: name, the shapes of the lines, the words for {w}

LOGS = (
    ("lift", ("car {d} door open at floor {d}", "car {d} overload, {n} kg too much", "car {d} waiting {n} s",
              "{w} pressed the alarm button", "door sensor of car {d} dirty"), "guest porter cleaner"),
    ("greenhouse", ("bed {d}: {n} ml of water given", "window {d} opened, {n} degrees inside", "tank at {n} percent",
                    "{w} lamp on for {n} minutes", "bed {d}: sensor silent"), "tomato pepper basil"),
    ("mail", ("queued {n} letters for {w}", "delivered letter {n}{n} to {w}", "refused letter {n}{n}: mailbox full",
              "deferred {w} for {n} minutes", "cleaned {d} old locks"), "nina@example.org office@example.org"),
    ("printer", ("job {n} from {w}: {d} pages", "paper jam in tray {d}", "job {n} cancelled by {w}", "toner low",
                 "woke after {n} minutes"), "accounts library studio"),
    ("ferry", ("{w} left berth {d} with {n} cars", "{w} reports wind of {n} knots", "ramp {d} raised",
               "{w} delayed by {n} minutes", "berth {d} free"), "Gull Tern Petrel"),
    ("bakery", ("order {n}{n} accepted: {n} rolls", "oven {d} hot after {n} minutes", "{w} sold out",
                "order {n}{n} gone",
                "till {d} opened without a sale"), "rye spelt brioche"),
    ("archive", ("box {n}{n} scanned, {d} pages blank", "{w} signed in", "shelf {d} humidity {n} percent",
                 "box {n}{n} returned by {w}", "scanner {d} recalibrated"), "Orla Bengt Farah"),
    ("telescope", ("dome turned to {n} degrees", "exposure {d} of {n} s saved", "clouds, shutter {d} closed",
                   "{w} lost after {n} s", "guide star {n} found"), "track focus cooling"),
    ("car park", ("ticket {n}{n} issued at gate {d}", "ticket {n}{n} unreadable", "{w} called the desk",
                  "level {d} full, {n} cars waiting", "gate {d} opened by hand"), "driver guard courier"),
    ("radio", ("switched to {w} for {n} s", "signal down {d} dB", "silence of {n} s on line {d}", "jingle played twice",
               "fader {d} stuck"), "studio archive outside"),
)  # fmt: skip
LOG_TASKS = (
    (LIGHT, "What is worth a look in this log, and why?"),
    (MEDIUM, "Show the first three lines and explain each below it."),
    (LIGHT, "Between which two lines is the longest pause?"),
    (MEDIUM, "Print only the lines that report a problem."),
    (LIGHT, "Write a short note to the next shift about what happened."),
    (HEAVY, "Print the log again without the seconds."),
    (LIGHT, "Sort the kinds of messages by how urgent they are."),
    (MEDIUM, "Quote the last two lines and explain them to a beginner."),
    (LIGHT, "Write a regular expression that matches the times in this log."),
    (LIGHT, "One message in this log should be worded better. Which, and how?"),
    (HEAVY, "Put square brackets around every time and give back all lines."),
)


def logs() -> Iterator[Made]:
    """Two logs of each system."""
    for i, (name, shapes, words) in enumerate(LOGS):
        for j in (0, 1):
            rng = random.Random(f"log {name} {j}")
            seconds = rng.randint(5, 20) * 3600 + rng.randint(0, 3000)
            lines = []
            for shape in (*rng.sample(shapes, len(shapes)), *rng.sample(shapes, rng.randint(1, 3))):
                seconds += rng.randint(2, 140)
                text = shape.replace("{w}", rng.choice(words.split()))
                for blank, low, high in (("{d}", 1, 9), ("{n}", 11, 99)):
                    while blank in text:
                        text = text.replace(blank, str(rng.randint(low, high)), 1)
                lines.append(f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02} {name}: {text}")
            repetition, task = LOG_TASKS[(2 * i + 5 * j) % len(LOG_TASKS)]
            text = "\n".join(lines)
            yield Made("log-analysis", repetition, f"log-{name}", (f"{task}\n\n{text}",))


# Settings: program, sections of key and value, in turn written as INI, YAML, TOML, JSON and environment variables

SETTINGS: tuple[tuple[str, dict[str, dict[str, Setting]]], ...] = (
    ("tidewatch", {"server": {"host": "0.0.0.0", "port": 8090}, "alarm": {"level_cm": 310, "siren": True}}),
    ("breadbot", {"oven": {"max_degrees": 240, "preheat_minutes": 25}, "orders": {"open_until": "17:30"}}),
    ("letterbox", {"smtp": {"server": "mail.example.org", "port": 587, "tls": True}, "limits": {"size_mb": 20}}),
    ("stagelight", {"dmx": {"universe": 2, "channels": 96}, "scenes": {"fade_seconds": 4, "loop": False}}),
    ("gallery", {"images": {"width": 1600, "quality": 82}, "cache": {"folder": "/var/cache/gallery", "days": 30}}),
    ("birdcount", {"map": {"zoom": 11, "tiles": "https://tiles.example.net"}, "login": {"guests": True}}),
    ("queue", {"workers": {"count": 6, "memory_mb": 512}, "retry": {"times": 3, "pause_seconds": 20}}),
    ("printshop", {"paper": {"tray": 2, "format": "A4"}, "colour": {"profile": "matte", "draft": False}}),
    ("radioclock", {"sender": {"frequency_mhz": 98.4, "name": "Radio Quay"}, "wake": {"time": "06:40", "volume": 35}}),
    ("farmgate", {"gate": {"close_at": "21:15", "code_digits": 5}, "camera": {"resolution": "720p", "night": True}}),
    ("archive", {"scan": {"dpi": 400, "grey": True}, "storage": {"path": "/srv/archive", "copies": 2}}),
    ("chessclub", {"clock": {"minutes": 15, "increment": 10}, "board": {"theme": "walnut", "sounds": False}}),
)
CONFIG_TASKS = (
    (HEAVY, "Change {key} to {value} and print the whole file."),
    (LIGHT, "What might the setting {key} do, and what happens if it is wrong?"),
    (MEDIUM, "Write a comment above every setting of the section {section}, and show that section."),
    (HEAVY, "Add `log_level` with the value `info` to each section."),
    (LIGHT, "How would you check this before {program} is restarted?"),
    (HEAVY, "Set {key} to {value}; leave everything else as it is, and show the result."),
    (LIGHT, "Which of these settings may differ from machine to machine?"),
    (MEDIUM, "Show only the section {section}, without {key}, and say what the program will do then."),
    (LIGHT, "Write the documentation of {key} in two sentences."),
    (HEAVY, "Rewrite this file as {other}, with the same names and values."),
    (LIGHT, "The program finds an unknown key in {section}. Where would you look?"),
)  # fmt: skip
CONFIG_FORMATS = ("INI", "YAML", "TOML", "JSON", "environment variables")


def settings() -> Iterator[Made]:
    """Two prompts of each program's settings."""
    for i, (program, parts) in enumerate(SETTINGS):
        for j in (0, 1):
            rng = random.Random(f"settings {program} {j}")
            section = rng.choice(list(parts))
            key, old = rng.choice(list(parts[section].items()))
            repetition, task = CONFIG_TASKS[(2 * i + 7 * j) % len(CONFIG_TASKS)]
            style = CONFIG_FORMATS[(i + 2 * j) % len(CONFIG_FORMATS)]
            other = CONFIG_FORMATS[(i + 2 * j + 1) % 4]
            new = _other_value(rng, old)
            words = task.format(key=f"`{key}`", value=f"`{new}`", section=section, program=program, other=other)
            text = _settings_text(style, parts, program)
            yield Made("config-edit", repetition, f"settings-{program}", (f"{words}\n\n# {program}, {style}\n{text}",))


OTHERS = {
    "0.0.0.0": "127.0.0.1", "mail.example.org": "smtp.example.org", "https://tiles.example.net": "https://a.example.net",
    "A4": "A5", "matte": "glossy", "Radio Quay": "Radio Pier", "720p": "1080p", "walnut": "maple",
}  # fmt: skip


def _other_value(rng: random.Random, old: Setting) -> str | int | float:
    if isinstance(old, bool):
        return str(not old).lower()
    if isinstance(old, (int, float)):
        return round(old + rng.randint(1, 9), 1)
    if ":" in old and "/" not in old:
        return f"{rng.randint(5, 22):02}:{rng.choice((5, 20, 35, 50)):02}"
    return f"/mnt{old}" if old.startswith("/") else OTHERS[old]


def _settings_text(style: str, parts: dict[str, dict[str, Setting]], program: str) -> str:
    if style == "JSON":
        return json.dumps(parts, indent=2)
    lines: list[str] = []
    for section, values in parts.items():
        if style in ("INI", "TOML"):
            lines.append(f"[{section}]")
        elif style == "YAML":
            lines.append(f"{section}:")
        for key, value in values.items():
            written = str(value).lower() if isinstance(value, bool) else str(value)
            if style == "YAML":
                lines.append(f"  {key}: {json.dumps(value) if ':' in written else written}")
            elif style == "environment variables":
                lines.append(f"{program}_{section}_{key}".upper() + f"={written}")
            else:
                lines.append(f"{key} = {json.dumps(value) if style == 'TOML' else written}")
    return "\n".join(lines)


# Sums


def sums() -> Iterator[Made]:
    """Two word problems of each kind, with whole results where the text needs them."""
    for i, problem in enumerate(PROBLEMS):
        for j in (0, 1):
            rng = random.Random(f"sum {i} {j}")
            text = problem(rng)
            task, repetition = SUM_TASKS[(2 * i + j) % len(SUM_TASKS)]
            yield Made("math", repetition, f"sum-{i + 1:02}", (task.format(text=text),))


SUM_TASKS = (
    ("{text}", LIGHT),
    ("{text} Show each step.", LIGHT),
    ("Write the problem down once more, then solve it. {text}", MEDIUM),
    ("{text} Estimate first, then calculate.", LIGHT),
    ("{text} Give only the result and one line of reasoning.", LIGHT),
)
PROBLEMS: tuple[Callable[[random.Random], str], ...] = (
    lambda r: (
        f"A reel holds {r.randint(30, 60) * 10} m of cable. {r.choice(('A roofer', 'A sailor'))} cuts "
        f"off {r.randint(5, 9)} pieces of {r.randint(12, 29)} m each. How much is left?"
    ),
    lambda r: (
        f"{r.choice(('Ulla', 'Marek', 'Thandi'))} sews {r.randint(3, 8)} cushions an hour and takes a break of "
        f"{r.choice((20, 30, 40))} minutes after every third hour. When are {r.randint(30, 60)} cushions finished if "
        f"the work begins at {r.randint(7, 9)} o'clock?"
    ),
    lambda r: (
        f"A garden of {r.randint(8, 15)} m by {r.randint(16, 25)} m gets a path of {r.choice((1, 2))} m along all four "
        f"sides, inside the fence. How many square metres remain for the {r.choice(('beds', 'lawn', 'bees'))}?"
    ),
    lambda r: (
        f"Two ferries start at the same pier at six o'clock. One returns every {r.choice((12, 18, 20))} minutes, the "
        f"other every {r.choice((15, 25, 27))}. When do they next leave together?"
    ),
    lambda r: (
        f"{r.choice(('A coat', 'A clock', 'A canoe'))} is reduced by {r.choice((10, 20, 25))} % and then by another "
        f"{r.choice((5, 15, 30))} %. It now costs {r.randint(51, 209)} francs. What did it cost at first, to the franc?"
    ),
    lambda r: (
        f"In a box there are {r.randint(3, 7)} red, {r.randint(4, 9)} green and {r.randint(2, 5)} white "
        f"{r.choice(('buttons', 'marbles', 'beads'))}. Two are drawn without looking. How likely are two of one colour?"
    ),
    lambda r: (
        f"A baker mixes {r.randint(2, 6)} kg of rye flour at {r.choice((120, 140, 160))} cents a kilo with "
        f"{r.randint(3, 9)} kg of wheat flour at {r.choice((80, 90, 110))} cents. What does a kilo of the mixture cost?"
    ),
    lambda r: (
        f"A number is multiplied by {r.randint(3, 8)}, then {r.randint(4, 19)} is taken away, and the result is "
        f"{r.randint(60, 140)}. Is the number whole? Find it."
    ),
    lambda r: (
        f"{r.randint(18, 34)} children sit in rows of equal length, and {r.randint(2, 5)} adults stand behind them. "
        f"Which lengths of the rows are possible, and which one would you choose for a photograph?"
    ),
    lambda r: (
        f"A hiker climbs {r.randint(5, 9)}00 m in height at {r.randint(25, 45) * 10} m an hour and walks down twice as "
        f"fast. With a rest of {r.choice((25, 35, 50))} minutes at the top, how long is the whole tour?"
    ),
    lambda r: (
        f"The hands of a clock stand at {r.randint(1, 11)}:{r.choice((10, 20, 40, 50))}. What is the smaller angle "
        f"between them?"
    ),
    lambda r: (
        f"A library lends {r.randint(140, 320)} books in the first week and {r.randint(5, 12)} more in every week "
        f"after. How many has it lent after {r.randint(6, 11)} weeks?"
    ),
    lambda r: (
        f"{r.choice(('Three', 'Four', 'Five'))} friends share a bill of {r.randint(70, 190)} euros. One of them pays "
        f"{r.choice((10, 12, 15))} euros more than each of the others. What does everyone pay?"
    ),
)


# Lists

LISTED = (
    ("colours of yarn", "moss rust ivory plum slate amber coral teal sand indigo"),
    ("stations of the school trip", "quarry windmill dairy castle weir chapel aviary sawmill ropeyard kiln"),
    ("drinks of the kiosk", "cider cocoa lemonade buttermilk espresso squash tonic chai punch cordial"),
    ("members of the band", "Lotta Ignaz Pia Ruben Sigrid Tomasz Ylva Baptiste Delia Enzo"),
    ("woods in the store", "maple larch yew cherry spruce walnut elm willow rowan hornbeam"),
    ("rooms to be painted", "pantry attic hall nursery study porch cellar larder gallery washroom"),
)
LIST_TASKS = (
    (HEAVY, "Put this list into alphabetical order, one a line, with numbers."),
    (MEDIUM, "Strike the second and the fifth from this list and print the rest."),
    (LIGHT, "Which three of these would you drop, and on what grounds?"),
    (HEAVY, "Give me the same list backwards, each with a dash in front."),
    (MEDIUM, "Split this list into two groups of your choice and name the groups."),
    (LIGHT, "Add three more that fit, and only those three."),
    (HEAVY, "Repeat this list and write one adjective behind each entry."),
)


def lists() -> Iterator[Made]:
    """Two tasks on each list."""
    for i, (name, words) in enumerate(LISTED):
        for j in (0, 1):
            rng = random.Random(f"list {name} {j}")
            repetition, task = LIST_TASKS[(2 * i + j) % len(LIST_TASKS)]
            chosen = rng.sample(words.split(), rng.randint(6, 9))
            text = "\n".join(f"- {w}" for w in chosen) if i % 2 else ", ".join(chosen)
            yield Made("list", repetition, f"list-{name.split()[0]}", (f"{task}\n\n{name.capitalize()}:\n{text}",))

"""What the payoff driver's processes run in its tests."""

import os


def doubled(number, answer):
    answer.send([number, number])


def complains(answer):
    answer.send("OSError: no room")


def dies(answer):
    os._exit(3)


def process_id(answer):
    answer.send([os.getpid()])

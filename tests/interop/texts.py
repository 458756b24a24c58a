"""Forty texts to continue: code, prose, eleven scripts besides Latin, conversations. All written for this test.

A text is a string, or a list of messages that the model's chat template turns into one. Texts stop where something must
follow, so that the models have more than "the end" to say.
"""

from __future__ import annotations

Conversation = list[dict[str, str]]

CODE: dict[str, str] = {
    "python": '''from __future__ import annotations

import heapq
from collections import defaultdict


class Graph:
    """A weighted, directed graph stored as adjacency lists."""

    def __init__(self) -> None:
        self.edges: dict[str, list[tuple[str, float]]] = defaultdict(list)

    def add_edge(self, source: str, target: str, weight: float) -> None:
        self.edges[source].append((target, weight))

    def shortest_path(self, start: str, goal: str) -> list[str]:
''',
    "c": """#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A ring buffer of bytes: head is where the next byte is written, tail where the next is read. */
struct ring {
    unsigned char *data;
    size_t capacity, head, tail;
};

static int ring_put(struct ring *r, unsigned char byte)
{
    size_t next = (r->head + 1) % r->capacity;
    if (next == r->tail)
        return -1;
""",
    "rust": """use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader};

/// Counts how often each word occurs in a file, ignoring case.
fn count_words(path: &str) -> io::Result<HashMap<String, usize>> {
    let file = File::open(path)?;
    let mut counts = HashMap::new();
    for line in BufReader::new(file).lines() {
        for word in line?.split_whitespace() {
""",
    "go": """package main

import (
	"encoding/json"
	"log"
	"net/http"
	"sync"
)

type Counter struct {
	mu     sync.Mutex
	values map[string]int
}

func (c *Counter) Add(name string, delta int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.values[name] += delta
	return c.values[name]
}

func main() {
	counter := &Counter{values: map[string]int{}}
	http.HandleFunc("/add", func(w http.ResponseWriter, r *http.Request) {
""",
    "javascript": """// Fetches all pages of a list that the server hands out in pieces.
async function* pages(url, { signal } = {}) {
  let next = url;
  while (next) {
    const response = await fetch(next, { signal });
    if (!response.ok) {
      throw new Error(`${response.status} ${response.statusText}`);
    }
    const body = await response.json();
    yield body.items;
    next = body.links?.next ?? null;
  }
}

const total = document.querySelector("#total");
for await (const items of pages("/api/orders")) {
""",
    "sql": """CREATE TABLE customers (
    id         INTEGER PRIMARY KEY,
    name       TEXT NOT NULL,
    country    TEXT NOT NULL,
    created_at TIMESTAMP DEFAULT CURRENT_TIMESTAMP
);

CREATE TABLE orders (
    id          INTEGER PRIMARY KEY,
    customer_id INTEGER NOT NULL REFERENCES customers (id),
    amount      NUMERIC(10, 2) NOT NULL,
    paid        BOOLEAN DEFAULT FALSE
);

-- The ten countries with the highest unpaid amount, and how many customers owe it
SELECT""",
    "bash": """#!/usr/bin/env bash
# Backs up every database to a folder named by the date, and deletes backups older than two weeks.
set -euo pipefail

target="${BACKUP_DIR:-/var/backups/postgres}/$(date +%F)"
mkdir -p "$target"

psql -At -c 'SELECT datname FROM pg_database WHERE NOT datistemplate' | while read -r name; do
  echo "dumping $name"
""",
    "haskell": """module Parser where

import Control.Applicative
import Data.Char (isDigit, isSpace)

newtype Parser a = Parser { runParser :: String -> Maybe (a, String) }

instance Functor Parser where
  fmap f (Parser p) = Parser $ \\input -> case p input of
    Nothing        -> Nothing
    Just (a, rest) -> Just (f a, rest)

instance Applicative Parser where
""",
    "html": """<!DOCTYPE html>
<html lang="en">
<head>
  <meta charset="utf-8">
  <title>Opening hours</title>
  <style>
    body { font-family: sans-serif; max-width: 40rem; margin: 2rem auto; }
    table { border-collapse: collapse; }
    td, th { padding: 0.25rem 1rem; border-bottom: 1px solid #ccc; }
  </style>
</head>
<body>
  <h1>Opening hours</h1>
  <table>
    <tr><th>Day</th><th>From</th><th>To</th></tr>
    <tr><td>Monday</td><td>9:00</td><td>17:00</td></tr>
""",
    "java": """package org.example.shapes;

import java.util.ArrayList;
import java.util.List;

public abstract class Shape {
    private final String name;

    protected Shape(String name) {
        this.name = name;
    }

    public abstract double area();

    public static double totalArea(List<? extends Shape> shapes) {
        double sum = 0.0;
""",
    "json": """{
  "name": "weather-station",
  "version": "2.4.1",
  "location": {"latitude": 48.137, "longitude": 11.575, "altitude_m": 519},
  "sensors": [
    {"id": "t1", "kind": "temperature", "unit": "celsius", "interval_s": 60},
    {"id": "h1", "kind": "humidity", "unit": "percent", "interval_s": 60},
    {"id": "p1", "kind": "pressure", "unit": "hectopascal", "interval_s": 300},
""",
    "makefile": """CC      := gcc
CFLAGS  := -std=c11 -O2 -Wall -Wextra -pedantic
SOURCES := $(wildcard src/*.c)
OBJECTS := $(SOURCES:src/%.c=build/%.o)

.PHONY: all clean test

all: build/server

build/server: $(OBJECTS)
	$(CC) $(CFLAGS) -o $@ $^

build/%.o: src/%.c | build
	$(CC) $(CFLAGS) -c -o $@ $<
""",
}

PROSE: dict[str, str] = {
    "story": """The lighthouse had been dark for eleven winters when Marta rowed out to it with a can of oil, a box of
matches and the letter her grandfather had left in the flour tin. The sea was flat that evening, grey and heavy as
lead, and the gulls sat on the rocks without a sound. She tied the boat to an iron ring, climbed the slippery steps one
by one, and at the top she found that the door""",
    "science": """Photosynthesis takes place in two stages. In the first, which needs light, pigments in the membranes
of the chloroplast absorb photons and pass the energy on to electrons taken from water; oxygen is released as a
by-product. In the second stage, known as the Calvin cycle, the energy stored in ATP and NADPH is used to""",
    "recipe": """Lentil soup for four people

Ingredients: 250 g brown lentils, 2 onions, 3 carrots, 1 stick of celery, 2 cloves of garlic, 1 tin of chopped
tomatoes, 1.5 litres of vegetable stock, olive oil, cumin, salt and pepper.

1. Rinse the lentils and leave them in cold water while you chop the vegetables.
2. Heat the oil in a large pot and fry the onions until""",
    "history": """In the autumn of 1347 twelve ships from the Black Sea entered the harbour of Messina. Most of the
sailors aboard were dead, and those still alive were covered with black swellings. The authorities ordered the fleet out
of the harbour at once, but it was too late: within five years the plague""",
    "news": """The city council voted on Tuesday evening to close the old stone bridge to cars from the first of March.
Engineers had reported in the summer that two of its five arches were moving by several millimetres a year. Shop owners
on the eastern bank fear that customers will stay away; the mayor, however, said that""",
    "email": """Subject: Delay of the second delivery

Dear Ms Okafor,

thank you for your message of Thursday. I am sorry to say that the second part of your order, the twelve oak shelves,
has not left our workshop yet. The reason is that the timber arrived with a moisture content well above what we
accept, and it had to be dried again. We now expect""",
    "mathematics": """Theorem. There are infinitely many prime numbers.

Proof. Suppose that there were only finitely many primes, p1, p2, ..., pn. Consider the number N = p1 * p2 * ... * pn +
1. Since N is greater than 1, it has at least one prime divisor q. If q were one of the primes in the list, then q
would divide both N and the product p1 * p2 * ... * pn, and therefore""",
    "contract": """4. Termination

4.1 Either party may terminate this Agreement by giving the other party not less than thirty (30) days' written notice.

4.2 Either party may terminate this Agreement with immediate effect if the other party commits a material breach of any
of its obligations and fails to remedy that breach within fourteen (14) days of""",
    "dialogue": """"You said the train leaves at six," said Anna, looking at the empty platform.

"It does leave at six," said the old man, without looking up from his newspaper. "It leaves at six every day, except on
Sundays and on the days when the driver's wife is baking."

"And today?"

He folded the newspaper""",
    "table": """| Planet  | Diameter (km) | Day (hours) | Year (days) | Moons |
|---------|--------------:|------------:|------------:|------:|
| Mercury |         4,879 |      4222.6 |        88.0 |     0 |
| Venus   |        12,104 |      2802.0 |       224.7 |     0 |
| Earth   |        12,756 |        24.0 |       365.2 |     1 |
| Mars    |""",
}

SCRIPTS: dict[str, str] = {
    "cyrillic": """Весной река поднималась так высоко, что вода доходила до самых ворот. Дети выходили на крыльцо и
смотрели, как мимо плывут доски, старые лодки и целые деревья с корнями. Дедушка говорил, что в его детстве""",
    "greek": """Το χωριό μας βρίσκεται στην πλαγιά ενός βουνού, και από την πλατεία φαίνεται όλη η θάλασσα. Κάθε
καλοκαίρι έρχονται πολλοί επισκέπτες, αλλά τον χειμώνα μένουν μόνο λίγες οικογένειες, που""",
    "arabic": """كانت المدينة القديمة محاطة بسور عال له سبعة أبواب، وكان كل باب يغلق عند غروب الشمس. وفي وسط المدينة سوق
كبير يبيع فيه التجار القماش والتوابل والكتب، ويأتي الناس إليه من""",
    "hebrew": """בכל בוקר, לפני שהשמש עולה, הולך הדייג אל החוף ובודק את הרשתות שלו. לפעמים הן ריקות, ולפעמים יש בהן דגים
רבים כל כך, עד שהוא צריך לקרוא לשכניו כדי""",
    "devanagari": """गाँव के बाहर एक पुराना बरगद का पेड़ था, जिसके नीचे हर शाम लोग इकट्ठा होते थे। बूढ़े लोग अपनी जवानी
की कहानियाँ सुनाते थे और बच्चे""",
    "tamil": """மழை பெய்யத் தொடங்கியதும் குழந்தைகள் எல்லோரும் வீட்டை விட்டு வெளியே ஓடி வந்தார்கள். தெருவில் தண்ணீர்""",
    "han": """春天来了，山上的雪慢慢融化，小河里的水又涨了起来。村子里的人们开始准备播种，孩子们放学以后到田边去放风筝。
老师告诉我们，要想种好庄稼，首先必须""",
    "japanese": """駅前の小さな本屋は、祖父の時代からずっと同じ場所にある。店の奥には古い机が一つ置いてあり、主人は毎日
そこで新聞を読みながら客を待っている。ある雨の日、""",
    "hangul": """우리 동네에는 오래된 빵집이 하나 있다. 아침 여섯 시가 되면 갓 구운 빵 냄새가 골목 끝까지 퍼지고,
사람들은 줄을 서서 문이 열리기를 기다린다. 주인 아저씨는""",
    "thai": """ตลาดน้ำแห่งนี้เปิดตั้งแต่เช้ามืด ชาวบ้านพายเรือนำผักและผลไม้มาขาย นักท่องเที่ยวส่วนใหญ่ชอบ""",
    "georgian": """მთის სოფელში ზამთარი გრძელია და თოვლი ხშირად გზებს კეტავს. ხალხი სახლში რჩება, ცეცხლთან ზის და""",
    "armenian": """Ամեն աշուն մեր այգում հասնում են խաղողն ու նուռը, և ամբողջ ընտանիքը հավաքվում է""",
    "vietnamese": """Buổi sáng, khi sương còn chưa tan, bà tôi đã dậy nhóm bếp và nấu một nồi cháo nóng. Cả nhà ngồi
quanh chiếc bàn gỗ cũ, vừa ăn vừa kể cho nhau nghe""",
    "latin": """Der Zug hielt auf freier Strecke, und niemand wusste, warum. Eine Frau im grünen Mantel öffnete das
Fenster und rief: « Est-ce qu'on est déjà arrivés ? » Aus dem nächsten Wagen antwortete jemand auf Spanisch: «¡Todavía
no! Faltan""",
}

CHATS: dict[str, Conversation] = {
    "question": [
        {"role": "user", "content": "Why is the sky blue during the day but red in the evening? Please explain it to a "
         "ten-year-old in a few sentences, without formulas."},
    ],
    "system": [
        {"role": "system", "content": "You are a travel agent who answers briefly and always names a price in euros."},
        {"role": "user", "content": "I have four days in May and would like to see both mountains and the sea. Where "
         "should I go, and how do I get around without a car?"},
    ],
    "turns": [
        {"role": "user", "content": "What is the capital of Australia?"},
        {"role": "assistant", "content": "The capital of Australia is Canberra."},
        {"role": "user", "content": "Not Sydney? How did that come about, and when was the city founded?"},
    ],
    "programming": [
        {"role": "user", "content": "Write a Python function `is_palindrome(text)` that ignores case, spaces and "
         "punctuation. Show two examples of how it is called and what it returns."},
    ],
}  # fmt: skip

TEXTS: dict[str, str | Conversation] = {**CODE, **PROSE, **SCRIPTS, **CHATS}

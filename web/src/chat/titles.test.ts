import { expect, test } from "vitest";
import { cleanTitle } from "./titles";

test.each([
  ["Rivers of Spain", "Rivers of Spain"],
  ['"Rivers of Spain."\n\nThis title…', "Rivers of Spain"],
  ["**Title: Ríos**", "Ríos"],
  ["**Rivers** of `Spain`", "Rivers of Spain"],
  ["# Flüsse", "Flüsse"],
  ["<think>\nhm\n</think>\n\n„Flüsse“", "Flüsse"],
  ["", ""],
  ["a very long sentence that goes on and on and is certainly no title of a chat", ""],
])("%j has the title %j", (answer, title) => expect(cleanTitle(answer)).toBe(title));

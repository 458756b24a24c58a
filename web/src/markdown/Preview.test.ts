import { expect, test } from "vitest";
import { previewOf } from "./Preview";

test("previews HTML and SVG only", () => {
  expect(previewOf("html", "<b>x</b>")).toBe("<b>x</b>");
  expect(previewOf("SVG", '<?xml version="1.0"?><svg/>')).toMatch(/^<!doctype html>.*<svg\/>$/);
  expect(previewOf("xml", "<svg viewBox='0 0 1 1'/>")).toContain("<svg");
  for (const [language, text] of [["xml", "<note/>"], ["js", "<svg/>"], ["", "<html>"]] as const) expect(previewOf(language, text)).toBeNull();
});

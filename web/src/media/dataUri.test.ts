import { expect, test } from "vitest";
import { fromDataUri } from "./dataUri";

const GIF = btoa("GIF89a and more");

test("reads pictures and sounds, with the type of their content", async () => {
  const found = fromDataUri(`data:image/png;base64,${GIF}`)!;
  expect([found.type, await found.text()]).toEqual(["image/gif", "GIF89a and more"]);
  expect(fromDataUri(`data:audio/x-wav;base64,${btoa("fLaC")}`)!.type).toBe("audio/flac");
});

test("rejects everything else", () => {
  const others = [
    `data:text/html;base64,${GIF}`,
    `data:image/svg+xml;base64,${btoa("<svg/>")}`,
    `data:image/png;base64,${btoa("<svg/>")}`,
    `data:image/png,${GIF}`,
    `data:image/png;charset=x;base64,${GIF}`,
    "data:image/png;base64,?",
    `x data:image/png;base64,${GIF}`,
    "https://example.org/p.png",
    "",
    null,
    7,
    [GIF],
  ];
  for (const uri of others) expect([uri, fromDataUri(uri)]).toEqual([uri, null]);
});

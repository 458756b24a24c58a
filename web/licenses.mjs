// Writes LICENSES.txt: the licenses of the packages in the built page. Run it after `npm ci`.
import { existsSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { join } from "node:path";

const HERE = import.meta.dirname;
const { packages } = JSON.parse(readFileSync(join(HERE, "package-lock.json"), "utf8"));

const parts = Object.entries(packages)
  // Packages for building, testing or Node alone are not part of the page.
  .filter(([path, { dev, optional, devOptional }]) => path && !dev && !optional && !devOptional)
  .sort(([a], [b]) => (a < b ? -1 : 1))
  .map(([path, { version }]) => {
    const folder = join(HERE, path);
    const manifest = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
    const file = existsSync(folder) && readdirSync(folder).find((name) => /^licen[cs]e/i.test(name));
    const text = file ? readFileSync(join(folder, file), "utf8").trim() : "(The package has no file of it.)";
    return `${path.replace(/^.*node_modules\//, "")} ${version}: ${manifest.license}\n\n${text.replaceAll("\r\n", "\n")}\n`;
  });
writeFileSync(
  join(HERE, "LICENSES.txt"),
  `The page of llamado is built of these packages. Made by web/licenses.mjs.\n\n${parts.join(`\n${"-".repeat(80)}\n\n`)}`,
);

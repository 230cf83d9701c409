// Headless Chromium for the tests here: the one of the machine, quiet towards the outside.
import { existsSync } from "node:fs";
import { chromium } from "playwright-core";

const PATHS = ["/usr/bin/chromium", "/usr/bin/chromium-browser", "/usr/bin/google-chrome"];
const QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"];

/** Starts it; `page()` opens a page of its own, with what it said on its console in `page.said`. */
export async function startBrowser() {
  const executablePath = process.env.CHROMIUM ?? PATHS.find(existsSync);
  const args = [...QUIET, "--disable-component-update", "--disable-sync"];
  const browser = await chromium.launch({ executablePath, headless: true, args });
  return {
    async page(url) {
      const page = await (await browser.newContext()).newPage();
      page.said = [];
      page.on("console", (message) => page.said.push(message.text()));
      page.on("pageerror", (error) => page.said.push(`error: ${error.message}`));
      await page.goto(url);
      return page;
    },
    close: () => browser.close(),
  };
}

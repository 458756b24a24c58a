import { render } from "preact";
import "./style/base.css";
import "./style/print.css";
import { registerServiceWorker } from "./offline/register";
import { App } from "./shell/App";
import { followLanguage } from "./text";

const root = document.getElementById("app");
if (root) void followLanguage().then(() => render(<App />, root));
registerServiceWorker();
